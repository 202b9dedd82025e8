"""Which recipe of narrow floats each product gets, where several are allowed.

    1  a plan with each recipe, or none, for all the products that its rule finds
    2  where the fastest of them places a product, it gets the recipe that is the fastest for it there
    3  a plan with that, which is kept if it is faster

A recipe as one more choice of the inner problem would make each choice of a product several, with other placements
around it where partial sums may not stay; this costs one search more. What it leaves out is a product whose other
placement pays off with another recipe alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from torch import fx

from autopar.ir.analysis.eight_bits import Recipes, products_of
from autopar.ir.graph import CapturedModel, tensor_operands
from autopar.ir.plan import Recipe
from autopar.ir.rule import Assignment
from autopar.search.outer.prices import Prices
from autopar.search.pricing.pricing import Pricing


def fastest_for_each(
    captured: CapturedModel,
    pricing: Pricing,
    assignment: Sequence[Assignment],
    others: Mapping[Recipe | None, Prices],
) -> Recipes:
    """The fastest recipe of each product under a plan, none for those that are faster without, or may have none.

    pricing, assignment: of the plan. others: prices of the model by each recipe. Of recipes that are as fast the first.
    Products of one tensor, where the stack merges them or casts the tensor once for all, have one recipe.
    """
    workload = pricing.workload
    known = workload.analysis.names
    products = {node.name: product for node, product in products_of(captured).items()}
    times: dict[str, dict[Recipe | None, float]] = {}
    together: dict[str, list[str]] = {}
    stack = pricing.ops.cluster.device.stack
    merges = stack.merges or stack.shares_casts
    for group in workload.clusters.clusters:
        for node in group.members:
            if node.name in products:
                own = group.assignment(node, assignment[group.index])
                times[node.name] = {
                    recipe: _seconds(prices, node.name, own, pricing) for recipe, prices in others.items()
                }
                # Products that share a tensor, or its cast, have one recipe.
                one = tensor_operands(node)[0].name if merges else node.name
                together.setdefault(one, []).append(node.name)
    best: dict[str, Recipe | None] = {}
    for names in together.values():
        totals = {recipe: sum(times[name][recipe] for name in names) for recipe in others}
        best |= dict.fromkeys(names, min(totals, key=totals.__getitem__))
    found: dict[tuple[str, str, int], Recipe] = {}
    for name, product in products.items():
        chosen = others[best[workload.representative(known[name]).name]]
        recipe = chosen.workload.analysis.recipes.get(product)  # another one where it is pinned
        if recipe is not None:
            found[product] = recipe
    return found


def _seconds(prices: Prices, name: str, assignment: Assignment, pricing: Pricing) -> float:
    """Of a microbatch of a product, forward and backward; infinite where its recipe does not allow the placement."""
    node: fx.Node = prices.workload.analysis.names[name]
    rule = prices.workload.rule(node)
    choices = rule.choices()
    if not all(choice in choices for choice in assignment) or not rule.allows(assignment, pricing.mesh):
        return inf
    time = prices.ops.time(node, assignment, pricing.mesh, pricing.parts)
    if any(choice in rule.lowered for choice in assignment):
        time += prices.on(pricing.mesh).lowering(node, assignment, prices.ops, pricing.parts)
    return time.total_s
