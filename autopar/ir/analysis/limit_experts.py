"""A limit on how many tokens an expert takes.

    moe(x, index, weight, ..)      moe(x, index, weight, .., capacity_factor=1.25)

It changes what the model computes, so it is asked for (``Plan.expert_capacity``) and never chosen.
"""

from __future__ import annotations

from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel, call_nodes, copy_captured
from autopar.ir.ops import composite


def limit_experts(captured: CapturedModel, capacity_factor: float | None) -> CapturedModel:
    """``captured`` with experts that take at most ``capacity_factor`` times their even share of rows; None: no limit.

    See ``composite.moe`` for which rows are dropped. Raises PlanMismatch if the model has no experts.
    """
    if capacity_factor is None:
        return captured
    limited = copy_captured(captured)
    moe_nodes = [node for node in call_nodes(limited.graph) if node.target is composite.moe]
    if not moe_nodes:
        raise PlanMismatch(
            f"expert_capacity is {capacity_factor}, but {captured.name} has no experts.\n  try: leave it out"
        )
    for node in moe_nodes:
        node.kwargs = {**node.kwargs, "capacity_factor": capacity_factor}
    limited.graph_module.recompile()
    return limited
