"""The mesh axes of a plan that divide experts, whatever else they divide."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.plan import Plan
from autopar.ir.rule import factors_of_choice
from autopar.ir.rules.moe import EXPERTS


def expert_axes(plan: Plan) -> Mapping[str, bool]:
    """Axes of more than one rank over which some mixture of experts is spread, outermost first -> whether its tokens
    are dispatched there; else the ranks of the axis have the same ones."""
    chosen = [choices for block in plan.blocks for choices in block.ops.values()]
    found = {}
    for axis, size in plan.mesh.items():
        on_axis = (factors_of_choice(choices.get(axis)) for choices in chosen)
        of_experts = [factors for factors in on_axis if EXPERTS in factors]
        if of_experts and size > 1:
            found[axis] = any(len(factors) > 1 for factors in of_experts)
    return found
