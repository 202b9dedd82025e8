"""Programs for all sizes that divide as some do, from one capture with symbols.

the plan's 8 rows of 16 tokens, 2 sequence shards       one program for every even length
17 tokens                                               another for the odd ones, which have no such shards
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.capture.other_sizes import captured_at, sizes_of_inputs
from autopar.ir.capture.symbols import BATCH
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.operands import Results
from autopar.ir.placed.placed_model import PlacedModel, place_like
from autopar.ir.program import StageProgram
from autopar.ir.program_sizes import ROWS, Divisor, ProgramSizes
from autopar.ir.sizes import Point
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from autopar.passes.verify.same_programs import described_programs


def any_size_programs(
    symbolic: CapturedModel,
    like: PlacedModel,
    results: Results,
    wanted: Mapping[str, int],
    capacity: float | None,
) -> tuple[CapturedModel, tuple[StageProgram, ...]] | None:
    """The capture and programs that run ``wanted`` and all sizes that divide alike; None if there are none.

    symbolic: in normal form. like: how parameters are stored and ops placed, at the sizes of the plan. wanted: by
    symbol. They are made at the plan's sizes if they hold for ``wanted`` too, as most parts are divided there.
    """
    planned = sizes_of_inputs(symbolic)
    of_plan: frozenset[Divisor] | None = None
    for own in (planned, {**planned, **wanted}):
        with suppress(CaptureError):
            captured = symbolic if own == planned else captured_at(symbolic, own, keep_symbols=True)
            placed = place_like(Analysis.of(captured, capacity, like.analysis.recipes), like)
            programs = partition(placed, outputs=results)
            assert programs[0].sizes is not None, "of a capture with symbols"
            symbols = replace(programs[0].sizes, unless=of_plan)
            of_plan = symbols.divides
            holds = symbols.hold_at(_point(symbols, {**planned, **wanted}, placed))
            if holds and _is_general(placed, results, programs, symbols):
                verify_placements(placed.captured, programs, placed.plan)
                return captured, tuple(replace(program, sizes=symbols) for program in programs)
    return None


def _point(symbols: ProgramSizes, sizes: Mapping[str, int], placed: PlacedModel) -> Point:
    rows = sizes.get(BATCH, placed.captured.batch_size) // _divisor(placed)
    return symbols.point({**sizes, ROWS: rows})


def _divisor(placed: PlacedModel) -> int:
    return placed.plan.data_parallel_size * placed.num_microbatches


def _is_general(placed: PlacedModel, results: Results, programs: Sequence[StageProgram], symbols: ProgramSizes) -> bool:
    """Whether programs with symbols are, at sizes that all differ from theirs, what is made at those from the start.

    A pass that writes a size as a number would show.
    """
    own = sizes_of_inputs(placed.captured)
    other = dict(own)
    for name, size in own.items():
        step = _divisor(placed) if name == BATCH else 1
        points = (({**own, name: number}, number) for number in _near(size, step))
        other[name] = next((n for sizes, n in points if symbols.hold_at(_point(symbols, sizes, placed))), size)
    point = _point(symbols, other, placed)
    if not symbols.hold_at(point) or any(other[name] == size for name, size in own.items()):
        return False
    fixed = place_like(Analysis.of(captured_at(placed.captured, other), placed.plan.expert_capacity), placed)
    return described_programs(programs, point) == described_programs(partition(fixed, outputs=results), {})


def _near(size: int, step: int) -> Iterator[int]:
    """Sizes near another, smaller ones first; none of 0 or 1, which may be computed with otherwise."""
    yield from range(size - step, max(1, step - 1), -step)
    yield from range(size + step, 4 * size + 1, step)
