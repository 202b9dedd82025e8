"""Prices of the tensors that move into a block: redistributions, and what crosses a cut before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.ir.analysis.matrix_products import is_product
from autopar.ir.placed.assign import spread
from autopar.ir.placed.layouts import Layouts, Need
from autopar.ir.placement import Layout
from autopar.ir.redistribution import gathers_only, reduces_or_all_to_alls
from autopar.ir.rule import Assignment
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.arrivals import Tensor, Transfer
from autopar.search.problem.workload import Workload


@dataclass(frozen=True, slots=True)
class Moves:
    """Redistributions. recomputed_s: forward seconds of those whose results selective rematerialisation does not
    save."""

    all: OpTime = ZERO
    recomputed_s: float = 0.0

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.all + other.all, self.recomputed_s + other.recomputed_s)


def layouts_of(workload: Workload, assignment: tuple[Assignment, ...]) -> Layouts:
    """Layouts of all tensors when op cluster ``c`` has assignment ``assignment[c]``."""
    assignments = spread(workload.analysis, assignment)
    return Layouts(
        analysis=workload.analysis, assignments=assignments, inputs=assignment[workload.clusters.inputs.index]
    )


def needs_of(layouts: Layouts, transfer: Transfer) -> Mapping[Need, list[fx.Node]]:
    """Layouts that the users of a transfer need -> those users."""
    found: dict[Need, list[fx.Node]] = {}
    for node, position in transfer.uses:
        found.setdefault(layouts.need_of(transfer.tensor.node, node, position), []).append(node)
    return found


def moved_by(pricing: Pricing, transfer: Transfer, layouts: Layouts) -> Moves:
    """Redistributions of a transfer."""
    source = layouts.made(transfer.tensor.node, transfer.tensor.result)
    made = {need: pricing.move(transfer, source, *need) for need in needs_of(layouts, transfer)}
    redone = sum(move.forward_s for need, move in made.items() if not reduces_or_all_to_alls(source, *need))
    every = sum(made.values(), ZERO)
    if pricing.memory.regathers:
        for need, nodes in needs_of(layouts, transfer).items():
            every += OpTime(0.0, _regathered_s(pricing, layouts, made[need].forward_s, source, need, nodes))
    return Moves(every, redone)


def _regathered_s(
    pricing: Pricing, layouts: Layouts, gather_s: float, source: Layout, need: Need, nodes: Sequence[fx.Node]
) -> float:
    """Seconds of gathering once more, for gradients of weights, what products read, as far as the products that compute
    gradients of what they read do not hide them."""
    products = [n for n in nodes if n in pricing.workload.reads_weights and is_product(n.target)]
    if not products or not gathers_only(source, *need):
        return 0.0
    return max(0.0, gather_s - sum(pricing.op(n, layouts.assignments[n]).backward_s / 2 for n in products))


def crossing_bytes(pricing: Pricing, crossing: Sequence[Tensor], layouts: Layouts) -> tuple[float | None, float]:
    """Bytes that cross the cut before a block, None if it cannot be cut there; of the gradients that come back."""
    if not all(tensor.floating for tensor in crossing):
        return None, 0.0
    sent = [pricing.local_bytes(tensor, layouts.made(tensor.node, tensor.result)) for tensor in crossing]
    return sum(sent), sum(size for tensor, size in zip(crossing, sent, strict=True) if tensor.differentiable)
