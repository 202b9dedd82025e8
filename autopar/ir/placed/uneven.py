"""Whether microbatches, of one rank or of several, may have batches of different sizes in one step, and be exact.

    rank 0   2 rows of 31 tokens        each runs with its own sizes; what they share is the sum of the loss, the number
    rank 1   1 row of 8 tokens          of its targets, and gradients

A number that comes of the batch (the divisor of a mean over rows) is that of the batch of all ranks, whatever rows each
has. No tensor of samples may cross a data axis, no op may need pieces of one size or count rows, and where lengths
differ no number may come of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.ir.capture.symbols import BATCH
from autopar.ir.graph import CapturedModel, call_nodes, is_getitem
from autopar.ir.placed.op_communication import op_communication
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.rules.call import op_name
from autopar.ir.rules.sizes import numbers_of

# Bytes of the largest number that ranks may add up, whatever they have of the batch.
_SCALAR_BYTES = 8
# Lowerings whose result does not depend on pieces being equal.
_ANY_PIECES = frozenset({"attention", "cross_entropy", "embedding", "moe", "random"})


def uneven_obstacle(placed: PlacedModel, symbolic: CapturedModel, varying: frozenset[str]) -> str | None:
    """Why microbatches cannot differ in the symbols ``varying``; None if they can. symbolic: the capture with
    symbols."""
    if BATCH not in symbolic.symbols:
        return "its capture holds for one batch size"
    for node in call_nodes(symbolic.graph):
        for what in _numbers(node, symbolic, varying):
            return f"{what} at {node.meta.get('source', 'an unknown line')}"
    axes = {placed.mesh.names[axis] for axis, choice in enumerate(placed.layouts.inputs) if choice is not None}
    for record in op_communication(placed, placed.num_microbatches):
        if axes.intersection(record.axes) and not record.dispatch and record.payload_bytes > _SCALAR_BYTES:
            return f"{record.of} is exchanged between data-parallel ranks ({record.kind})"
    if placed.plan.expert_capacity is not None:
        return "experts take as many tokens as the plan's batch gives them"
    for node in call_nodes(placed.captured.graph):
        if is_getitem(node):
            continue
        rule, choices = placed.analysis.rule(node), placed.layouts.assignments.get(node, ())
        over_ranks = [choice for name, choice in zip(placed.mesh.names, choices, strict=False) if name in axes]
        for choice in (placed.time_choice(node), *over_ranks):
            lowering = rule.lowered.get(choice) if choice is not None else None
            if lowering is not None and lowering not in _ANY_PIECES:
                return f"{node.name} needs pieces of one size ({lowering})"
    return None


def _numbers(node: fx.Node, symbolic: CapturedModel, varying: frozenset[str]) -> Iterator[str]:
    """Why the numbers that an op computes with are not those of all ranks."""
    batch = symbolic.symbols[BATCH]
    for number in numbers_of(node):
        symbols = number.expression.free_symbols
        if op_name(node.target) == "aten::arange":  # type: ignore[arg-type]  # an op
            if batch in symbols:
                yield "rows are counted"
        elif symbols - {batch} and varying - {BATCH}:
            yield "a number depends on lengths, which differ,"
