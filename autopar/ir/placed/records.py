"""The redistributions of one training step as records: what each rank sends, along which axis, how much, how often.

A record says what runs: moves that several users share are there once, and a backward is there only where a gradient
comes back. Collectives inside lowered ops, the sums of parameters' gradients and what a pipeline sends are not among
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import fx

from autopar.ir.analysis.gradient_flow import computed
from autopar.ir.graph import op_nodes, tensor_operands
from autopar.ir.placed.operands import Operands
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.uses import Move, Use
from autopar.ir.redistribution import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One collective of a training step.

    tensor: of the captured graph, which moves. kind: of collective. axis: of the mesh. payload_bytes: of one rank, of
    the tensor as it is before a scatter or after a gather, of one microbatch, in its captured dtype. times: in a step.
    """

    tensor: fx.Node
    kind: Collective
    phase: Literal["forward", "backward"]
    axis: str
    payload_bytes: int
    times: int


def redistribution_records(placed: PlacedModel) -> tuple[Record, ...]:
    """Every collective of a training step that changes the layout of a tensor between ops."""
    operands = Operands(placed=placed, results="loss")
    runs = computed(placed.captured)
    moves: dict[Move, bool] = {}
    for user in op_nodes(placed.captured.graph):
        if user not in runs:
            continue
        for position in range(len(tensor_operands(user))):
            use = operands.of(user, position)
            for move in use.moves:
                # A gradient comes back through any user that has one.
                moves[move] = moves.get(move, False) or (user in operands.flow and use.tensor in operands.flow)
    for use in _updates(operands):
        for move in use.moves:
            moves.setdefault(move, False)
    return tuple(record for move, differentiable in moves.items() for record in _records(placed, move, differentiable))


def _updates(operands: Operands) -> Iterator[Use]:
    """Uses of the new values of buffers."""
    placed = operands.placed
    for buffer in placed.captured.buffers.values():
        if buffer.updated_by is not None:
            yield operands.update_of(placed.analysis.names[buffer.updated_by])


def _records(placed: PlacedModel, move: Move, differentiable: bool) -> Iterator[Record]:
    value, over_time = move.tensor.meta["val"], placed.over_time(move.tensor)
    numel = max(prod(placed.local_shape(move.tensor, layout, over_time)) for layout in (move.before, move.after))
    directions: tuple[tuple[Literal["forward", "backward"], Collective], ...] = (
        ("forward", move.step.forward),
        ("backward", move.step.backward if differentiable else Collective.NONE),
    )
    for phase, kind in directions:
        if kind.communicates:
            yield Record(
                tensor=move.tensor,
                kind=kind,
                phase=phase,
                axis=placed.mesh.names[move.step.axis],
                payload_bytes=numel * value.dtype.itemsize,
                times=placed.num_microbatches,
            )
