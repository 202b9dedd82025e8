"""The program of one rank of a stage mesh, on its way from the captured graph to local tensors and collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.ir.placed.operands import Results
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placement import Layout, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedProgram:
    """A graph for one microbatch, before it is cut into blocks and stages.

    Every node has ``meta["val"]``, ``meta["layout"]`` on the stage mesh, ``meta["over_time"]``, its placement over the
    microbatches, and ``meta["block"]``, PRELUDE for what depends on no parameter. origin: the captured op of an op.
    outputs: the flat outputs asked for, in order, with their layouts and placements over the microbatches. updates:
    buffer -> its new value. summed: those of which every microbatch has a summand; the others are the same in each.
    provides: what the passes that have run have made of it.
    """

    placed: PlacedModel
    results: Results
    graph: fx.Graph
    origin: Mapping[fx.Node, fx.Node]
    outputs: tuple[fx.Node, ...]
    output_layouts: tuple[Layout, ...]
    output_microbatches: tuple[Placement, ...]
    updates: Mapping[str, fx.Node]
    summed: frozenset[str]
    provides: frozenset[str] = frozenset()


class ProgramPass(ABC):
    """A rewrite of a placed program. A subclass is a frozen dataclass; ``apply`` may edit the graph in place.

    requires: what passes before it have to provide; conflicts: what they must not. provides: what it makes true.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def apply(self, program: PlacedProgram) -> PlacedProgram:
        """The rewritten program."""


def check_order(passes: Iterable[ProgramPass], provided: frozenset[str] = frozenset()) -> None:
    """Raise AssertionError, naming the pass, where one would run without what it requires or after what it excludes."""
    for step in passes:
        missing, excluded = step.requires - provided, step.conflicts & provided
        assert not missing, f"{step.name} requires {', '.join(sorted(missing))}, which no pass before it provides"
        assert not excluded, f"{step.name} cannot run after {', '.join(sorted(excluded))}"
        provided |= step.provides


def run_program_passes(
    program: PlacedProgram,
    passes: Sequence[ProgramPass],
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
