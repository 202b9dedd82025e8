"""The program of one rank of a stage mesh, on its way from the captured graph to local tensors and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.placed.operands import Operands, Results
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.uses import Move
from autopar.ir.placement import Layout, Placement
from autopar.ir.program_sizes import ProgramSizes
from autopar.passes.contract import Pass, check_order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedProgram:
    """A graph for one microbatch, before it is cut into blocks and stages.

    Every node has ``meta["val"]``, ``meta["layout"]`` on the stage mesh, ``meta["over_time"]``, its placement over the
    microbatches, and ``meta["block"]``, PRELUDE for what depends on no parameter. origin: the captured op of an op;
    moves: what a redistribution carries out; operands: of the captured ops.
    outputs: the flat outputs asked for, in order, with their layouts and placements over the microbatches. updates:
    buffer -> its new value. summed: those of which every microbatch has a summand; the others are the same in each.
    sizes: the symbols of local shapes, None if they are numbers. provides: what the passes that have run have made of
    it.
    """

    placed: PlacedModel
    results: Results
    graph: fx.Graph
    origin: Mapping[fx.Node, fx.Node]
    moves: Mapping[fx.Node, Move]
    operands: Operands
    outputs: tuple[fx.Node, ...]
    output_layouts: tuple[Layout, ...]
    output_microbatches: tuple[Placement, ...]
    updates: Mapping[str, fx.Node]
    summed: frozenset[str]
    sizes: ProgramSizes | None = None
    provides: frozenset[str] = frozenset()


def run_program_passes(
    program: PlacedProgram,
    passes: Sequence[Pass[PlacedProgram]],
    *,
    after: Callable[[str, PlacedProgram], None] = lambda name, program: None,
) -> PlacedProgram:
    """Apply ``passes`` in order, after a check of their contracts. after: called with each name and result."""
    check_order(passes, program.provides)
    for step in passes:
        program = step.apply(program)
        program = replace(program, provides=program.provides | step.provides)
        program.graph.lint()
        after(step.name, program)
    return program
