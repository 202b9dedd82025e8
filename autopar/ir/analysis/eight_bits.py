"""The matrix products of a model that are computed in 8-bit floats, found by rule or named by a plan.

    linear(x, w)      scaled_linear(x, w, recipe='fp8-row')
    moe(x, ..)        moe(x, .., recipe='fp8-row')

By rule these are linear layers, and experts, in the part of a model that repeats; without any repeats, those that have
such products both before and after them. So the first and the last layers of a model are left as they are, the
projection to a vocabulary among them; and so are routers, whose results decide which are the largest, and layers whose
sizes 8-bit units cannot read. Attention has no weights and is no such product. A pin (``ir.recipe_pins``) goes before
the rule.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from autopar.ir.analysis.blocks import BlockRepetition, find_repetition
from autopar.ir.errors import InvalidInput, InvalidPlan
from autopar.ir.graph import Buffer, CapturedModel, call_nodes, copy_captured, tensor_operands
from autopar.ir.op_graph import op_graph
from autopar.ir.ops.composite import columns_linear, moe, scaled_linear
from autopar.ir.ops.maxima_history import shape_of_history
from autopar.ir.ops.scalings import SCALINGS, Scaling
from autopar.ir.plan import Plan, Recipe
from autopar.ir.recipe_pins import RecipePin
from autopar.ir.rules.call import op_name

# What a product is called in every capture of a model: its module, its weight, and which of those that are alike.
Product = tuple[str, str, int]
Recipes = Mapping[Product, Recipe]

_NO_HISTORY = (
    "which have no histories of maxima.\n  expected: a recipe with scales of the tensors at hand\n  try: fp8-tensor"
)
_LINEAR = (torch.ops.aten.linear.default, columns_linear)
_SELECTIONS = frozenset({"aten::topk", "aten::sort", "aten::argsort", "aten::argmax", "aten::max", "aten::kthvalue"})


def products_of(captured: CapturedModel) -> dict[fx.Node, Product]:
    """The linear layers of a model that multiply with a parameter, and its experts, in order."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[fx.Node, Product] = {}
    for node in call_nodes(captured.graph):
        weight = node.args[1] if node.target in _LINEAR else None
        of_linear = isinstance(weight, fx.Node) and weight.name in captured.parameters and weight.meta["val"].dim() == 2
        if of_linear or node.target is moe:
            key = str(node.meta.get("path", "")), next(iter(_weight_names(captured, node)), "")
            seen[key] += 1
            found[node] = (*key, seen[key])
    return found


def _weights(node: fx.Node) -> tuple[fx.Node, ...]:
    """The matrices of a product: one of a linear layer, two of experts."""
    return tuple(tensor_operands(node)[3:5] if node.target is moe else tensor_operands(node)[1:2])


def _sizes(node: fx.Node) -> list[int]:
    """Sizes of a product's matrices, each once."""
    first, *others = (own.meta["val"].shape[-2:] for own in _weights(node))
    return [int(size) for size in (*first, *(own[1] for own in others))]


def kept_wide(captured: CapturedModel, repetition: BlockRepetition, recipe: Recipe) -> dict[fx.Node, str]:
    """The linear layers that the rule leaves as they are, with the reason, in the order of the model."""
    multiple = SCALINGS[recipe].multiple
    products = products_of(captured)
    inner = set(_inner(products, repetition, captured))
    routers = set(_routers(captured))
    found: dict[fx.Node, str] = {}
    for node in products:
        sizes = _sizes(node)
        if node not in inner:
            found[node] = "one of the first or last layers"
        elif node in routers:
            found[node] = "a router"
        elif node.target is moe and SCALINGS[recipe].steps:
            found[node] = "experts, of which each would have a history"
        elif any(size % multiple for size in sizes):
            found[node] = f"its sizes {' x '.join(map(str, sizes))} are not multiples of {multiple}"
        elif not node.meta["val"].dtype.is_floating_point:
            found[node] = "not of real numbers"
    return found


def recipes_by_rule(captured: CapturedModel, recipe: Recipe | None, pins: Sequence[RecipePin] = ()) -> Recipes:
    """``recipe`` for every linear layer that the rule finds, and what ``pins`` say of any.

    Raises InvalidInput for a pin that names no linear layer, one whose sizes its recipe cannot have, or some of the
    repeats of a layer alone.
    """
    if recipe is None and not pins:
        return {}
    repetition, products = find_repetition(captured), products_of(captured)
    left = kept_wide(captured, repetition, recipe) if recipe is not None else products
    found = {product: recipe for node, product in products.items() if node not in left and recipe is not None}
    if not pins:
        return found
    names = {node: _weight_names(captured, node) for node in products}
    for pin in pins:
        for node in _pinned(pin, names):
            found.pop(products[node], None)
            if pin.recipe is not None:
                found[products[node]] = pin.recipe
    _check_repeats(repetition, products, found)
    return found


def _weight_names(captured: CapturedModel, node: fx.Node) -> tuple[str, ...]:
    """Of a weight that is computed from others there is none."""
    found = [captured.parameters[own.name] for own in _weights(node) if own.name in captured.parameters]
    return tuple(name for parameter in found for name in (*parameter.names, *parameter.whole_names))


def _pinned(pin: RecipePin, names: Mapping[fx.Node, tuple[str, ...]]) -> list[fx.Node]:
    """The linear layers of a pin. names: of their weights."""
    found = [node for node, own in names.items() if pin.matches(own)]
    if not found:
        every = [name for own in names.values() for name in own]
        close = difflib.get_close_matches(pin.pattern, every, n=3, cutoff=0.3)
        raise InvalidInput(
            f"recipe of {pin.pattern!r}: no linear layer has a weight of such a name.\n"
            f"  names like it: {', '.join(close) or 'none'}"
        )
    for node in found:
        sizes = _sizes(node)
        multiple = 1 if pin.recipe is None else SCALINGS[pin.recipe].multiple
        if any(size % multiple for size in sizes):
            raise InvalidInput(
                f"recipe of {pin.pattern!r}: {names[node][0]} is {' x '.join(map(str, sizes))}.\n"
                f"  at {node.meta.get('source', 'an unknown line')}\n"
                f"  expected for {pin.recipe}: multiples of {multiple}\n  try: a pattern without it"
            )
        if node.target is moe and pin.recipe is not None and SCALINGS[pin.recipe].steps:
            raise InvalidInput(f"recipe of {pin.pattern!r}: {names[node][0]} is of experts, {_NO_HISTORY}")
    return found


def _check_repeats(repetition: BlockRepetition, products: Mapping[fx.Node, Product], found: Recipes) -> None:
    """Raise InvalidInput if repeats of a layer, of which a plan says one thing, have several recipes."""
    for node, product in products.items():
        first = repetition.representative.get(node, node)
        own, other = found.get(product), found.get(products[first])
        if own != other:
            raise InvalidInput(
                f"recipes: {product[1]} is in {own or 'no narrow floats'} and {products[first][1]} in "
                f"{other or 'none'}; they are one layer of a block that repeats, of which a plan says one thing.\n"
                "  try: a pattern for all of its repeats, as in 'layers.*.up.weight'"
            )


def recipes_of_plan(captured: CapturedModel, plan: Plan) -> Recipes:
    """What ``plan`` says of the linear layers of a capture of its model.

    Raises InvalidPlan where it names an op that is none, or whose sizes 8-bit units cannot read. Of a plan for other
    blocks there is nothing to say; ``check_plan_fits`` refuses it.
    """
    if not any(block.recipes for block in plan.blocks):
        return {}
    repetition, products = find_repetition(captured), products_of(captured)
    if [kind.name for kind in repetition.kinds] != [block.name for block in plan.blocks]:
        return {}
    found: dict[Product, Recipe] = {}
    known: list[dict[str, fx.Node]] = [{} for _ in plan.blocks]
    for block in repetition.blocks:
        for node in block.nodes:
            if node in products:
                key = repetition.key[node]
                known[block.kind].setdefault(key, node)
                if key in plan.blocks[block.kind].recipes:
                    found[products[node]] = plan.blocks[block.kind].recipes[key]
    for stated, own in zip(plan.blocks, known, strict=True):
        for key, recipe in stated.recipes.items():
            _check(stated.name, key, recipe, own)
    return found


def _check(block: str, key: str, recipe: Recipe, known: Mapping[str, fx.Node]) -> None:
    if key not in known:
        close = difflib.get_close_matches(key, known, n=3)
        raise InvalidPlan(
            f"plan: recipes of block {block!r} name {key!r}, which is no linear layer of it, nor its experts.\n"
            f"  expected one of: {', '.join(close or known) or 'none, as it has no linear layers'}"
        )
    sizes = _sizes(known[key])
    multiple = SCALINGS[recipe].multiple
    if any(size % multiple for size in sizes):
        raise InvalidPlan(
            f"plan: op {key!r} of block {block!r} cannot be in {recipe}: its weight is "
            f"{' x '.join(map(str, sizes))}.\n  at {known[key].meta.get('source', 'an unknown line')}\n"
            f"  expected sizes that are multiples of {multiple}\n  try: leave it out of recipes"
        )
    if known[key].target is moe and SCALINGS[recipe].steps:
        raise InvalidPlan(f"plan: op {key!r} of block {block!r} is of experts, {_NO_HISTORY}")


def in_eight_bits(captured: CapturedModel, recipes: Recipes) -> CapturedModel:
    """``captured`` with the products that ``recipes`` names in 8-bit floats; itself if there are none."""
    if not recipes:
        return captured
    found = copy_captured(captured)
    buffers = dict(found.buffers)
    for node, product in products_of(found).items():
        if product in recipes and node.target is moe:
            node.kwargs = {**node.kwargs, "recipe": recipes[product]}
        elif product in recipes:
            options: dict[str, Any] = {"by_columns": True} if node.target is columns_linear else {}
            if SCALINGS[recipes[product]].steps:
                options["history"] = _add_history(found.graph, node, product, SCALINGS[recipes[product]], buffers)
            node.target, node.kwargs = scaled_linear, {**node.kwargs, "recipe": recipes[product], **options}
    found.graph_module.recompile()
    return replace(found, buffers=buffers)


def _add_history(
    graph: fx.Graph, node: fx.Node, product: Product, scaling: Scaling, buffers: dict[str, Buffer]
) -> fx.Node:
    """A buffer for the history of a product, the last of the placeholders; it is entered into ``buffers``."""
    path, weight, number = product
    last = [own for own in graph.nodes if own.op == "placeholder"][-1]
    with graph.inserting_after(last):
        made = graph.placeholder(f"history_of_{node.name}")
    made.meta["val"] = node.meta["val"].new_empty(shape_of_history(scaling), dtype=torch.float32)
    name = f"{weight}_history"
    if path != weight.rpartition(".")[0]:  # a weight that other modules have too
        name += f"_in_{path.replace('.', '_')}"
    if number > 1:
        name += f"_{number}"
    buffers[made.name] = Buffer(name=name, persistent=False, history=True)
    return made


def renamed(repetition: BlockRepetition, captured: CapturedModel) -> BlockRepetition:
    """The blocks of a model for a copy of it whose nodes have the same names."""
    own = {node.name: node for node in captured.graph.nodes}

    def each(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        return tuple(own[node.name] for node in nodes)

    # Histories of equal layers stand for each other as their weights do.
    histories = {
        history: other
        for node, first in repetition.representative.items()
        if isinstance(history := own[node.name].kwargs.get("history"), fx.Node)
        and isinstance(other := own[first.name].kwargs.get("history"), fx.Node)
    }
    return replace(
        repetition,
        prelude=each(repetition.prelude),
        blocks=tuple(replace(block, nodes=each(block.nodes)) for block in repetition.blocks),
        representative={own[node.name]: own[first.name] for node, first in repetition.representative.items()}
        | histories,
        key={own[node.name]: key for node, key in repetition.key.items()},
        block_of={own[node.name]: index for node, index in repetition.block_of.items()},
        crossings=tuple(map(each, repetition.crossings)),
    )


def _inner(
    products: Mapping[fx.Node, Product], repetition: BlockRepetition, captured: CapturedModel
) -> Iterator[fx.Node]:
    """The products between the first and the last."""
    repeated = [block.index for block in repetition.blocks if repetition.kinds[block.kind].repeats > 1]
    if repeated:
        inside = range(min(repeated), max(repeated) + 1)
        yield from (node for node in products if repetition.block_of.get(node) in inside)
        return
    ops = op_graph(captured.graph.nodes)
    for node in products:
        before, after = nx.ancestors(ops, node), nx.descendants(ops, node)
        if not before.isdisjoint(products) and not after.isdisjoint(products):
            yield node


def _routers(captured: CapturedModel) -> Iterator[fx.Node]:
    """The linear layers from which a selection of the largest can be reached without another product."""
    stack = [n for n in call_nodes(captured.graph) if callable(n.target) and op_name(n.target) in _SELECTIONS]
    seen = set(stack)
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand.target in _LINEAR:
                yield operand
            elif operand not in seen and operand.op == "call_function" and operand.target is not moe:
                seen.add(operand)
                stack.append(operand)
