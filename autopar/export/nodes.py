"""The ranks of a plan on the nodes of its cluster."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Nodes:
    """``count`` nodes of ``ranks_each`` ranks; ranks are numbered node by node. gpus: whether ranks are on GPUs."""

    count: int
    ranks_each: int
    gpus: bool


def nodes_of(plan: Plan) -> Nodes:
    """As many ranks on a node as it has devices and divides the ranks."""
    most = min(plan.cluster.gpus_per_node, plan.num_ranks)
    each = next(size for size in range(most, 0, -1) if plan.num_ranks % size == 0)
    return Nodes(plan.num_ranks // each, each, plan.cluster.gpu != "cpu")
