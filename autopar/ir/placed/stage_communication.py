"""Records of what stages of a pipeline send each other: tensors forward, and the gradients of those that have one
backward."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.gradient_flow import computed
from autopar.ir.graph import op_nodes, tensor_operands
from autopar.ir.lowered.inside import Phase
from autopar.ir.placed.operands import Operands
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.records import PIPELINE_AXIS, Record
from autopar.ir.placed.uses import Move
from autopar.ir.precision import itemsize_of


def stage_communication(placed: PlacedModel, num_microbatches: int) -> tuple[Record, ...]:
    """Every send of a step of ``num_microbatches``. A tensor needed further down passes through every stage between."""
    return tuple(_sends(placed, num_microbatches)) if placed.plan.num_stages > 1 else ()


def _sends(placed: PlacedModel, num_microbatches: int) -> Iterator[Record]:
    plan, rank_of = placed.plan, placed.plan.pipelining.rank_of
    for value, (first, last) in _spans(placed).items():
        tensor = value.tensor if isinstance(value, Move) else value
        layout = value.after if isinstance(value, Move) else placed.layout(tensor)
        numel = prod(placed.local_shape(tensor, layout, placed.over_time(tensor)))
        payload = float(numel * itemsize_of(tensor.meta["val"].dtype, plan.precision))
        for stage in range(first, last):
            if rank_of(stage) == rank_of(stage + 1):
                continue  # stages of one rank hand tensors over
            ways: tuple[tuple[Phase, tuple[int, int]], ...]
            ways = (("forward", (stage, stage + 1)),)
            if tensor in placed.analysis.flow:
                ways = (*ways, ("backward", (stage + 1, stage)))
            for phase, pair in ways:
                yield Record(
                    cause="stage",
                    of=tensor.name,
                    kind="send",
                    phase=phase,
                    axes=(PIPELINE_AXIS,),
                    payload_bytes=payload,
                    times=num_microbatches,
                    stages=pair,
                )


def _spans(placed: PlacedModel) -> dict[fx.Node | Move, tuple[int, int]]:
    """Every tensor or result of a move that a block makes -> the stage that makes it, and the last that reads it."""
    operands, runs = Operands(placed=placed, results="loss"), computed(placed.captured)
    block_of = placed.analysis.block_of
    found: dict[fx.Node | Move, tuple[int, int]] = {}

    def read(value: fx.Node | Move, made_in: int, block: int) -> None:
        if made_in == PRELUDE or block == PRELUDE:
            return  # every stage makes it for itself
        first, last = placed.plan.stage_of(made_in), placed.plan.stage_of(block)
        found[value] = first, max(last, found.get(value, (first, first))[1])

    for user in op_nodes(placed.captured.graph):
        if user not in runs:
            continue
        for position in range(len(tensor_operands(user))):
            use = operands.of(user, position)
            value: fx.Node | Move = use.tensor
            made_in = block_of(use.tensor)
            if use.read is not None:
                made_in = use.read.block
            for move in use.moves:
                if use.read is None or move.previous is not None:
                    read(value, made_in, move.block)
                value, made_in = move, move.block
            if use.read is None or use.moves:
                read(value, made_in, block_of(user))
    return found
