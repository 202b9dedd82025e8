"""Plans for batches that do not divide: for the next number of rows that does, of which a step then has a few fewer.

    30 rows on 4 data-parallel ranks      a plan for 32; a step has 8, 8, 7 and 7

Where microbatches cannot differ (``ir/placed/uneven.py``: batch statistics, 8-bit floats), only batches that divide
have plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import lcm

from autopar.ir.capture.symbols import BATCH
from autopar.ir.errors import AutoparError, InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.placed.uneven import uneven_obstacle
from autopar.ir.plan import Plan
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult

# A free search is made again for rows that all ranks divide, on so many ranks at most, as it takes as long again, and
# where it adds this share of the rows at most. Chosen.
_MOST_RANKS, _MOST_ADDED = 16, 0.25


def search_rows(
    batch: int,
    num_ranks: int,
    constraints: Constraints,
    *,
    search: Callable[[int, Constraints], SearchResult],
    symbolic: Callable[[], CapturedModel],
) -> SearchResult:
    """The fastest plan for a batch of so many rows.

    search: for a captured batch of any number of rows, of which a step has ``batch``. symbolic: the capture with
    symbols, in normal form. Raises what they raise for the first number of rows that is tried, or InfeasiblePlan where
    the batch has to divide and does not.
    """
    best: SearchResult | None = None
    with_symbols = cache(symbolic)
    for rows, limits in _tried(batch, num_ranks, constraints):
        try:
            found = search(rows, limits)
            if found.plan.planned_rows != batch:
                _check(found.plan, found.workload.captured, batch, with_symbols)
        except AutoparError:
            if best is None:
                raise
            continue
        if best is not None and found.plan.planned_rows != rows:
            continue  # the first search had that plan too
        if best is None or found.predicted.step_time_s < best.predicted.step_time_s:
            best = found
    assert best is not None, "a number of rows is tried"
    return best


def _check(plan: Plan, captured: CapturedModel, batch: int, symbolic: Callable[[], CapturedModel]) -> None:
    """Raise InfeasiblePlan if microbatches under ``plan`` cannot differ. captured: with its ``planned_rows``."""
    obstacle = uneven_obstacle(place_captured(captured, plan), symbolic(), frozenset({BATCH}))
    if obstacle is not None:
        pieces = plan.batch.num_microbatches * plan.data_parallel_size
        raise InfeasiblePlan(
            f"the global batch of {batch} does not divide into {pieces} microbatches, of {plan.data_parallel_size} "
            f"data-parallel ranks, which cannot differ: {obstacle}.\n  try: a batch of {plan.planned_rows}, or smaller "
            "degrees"
        )


def _tried(batch: int, ranks: int, constraints: Constraints) -> Iterator[tuple[int, Constraints]]:
    """Numbers of rows to search plans for: those that the pinned degrees divide, and perhaps all ranks. Microbatches
    have at most the size that is pinned."""
    dp, count, size = constraints.degree("dp") or 1, constraints.num_microbatches or 1, constraints.microbatch_size
    pieces, limits = dp * count, constraints
    if size is not None and size > 0 and constraints.num_microbatches is None and batch % (dp * size):
        pieces = dp * -(-batch // (dp * size))
        limits = replace(constraints, microbatch_size=-(-batch // pieces))
    if pieces <= 0 or pieces > batch:
        yield batch, constraints  # which says that it cannot be
        return
    first = -(-batch // pieces) * pieces
    yield first, limits
    if not constraints.pins("dp") and size is None and ranks <= _MOST_RANKS:
        all_ranks = lcm(pieces, ranks)
        rows = -(-batch // all_ranks) * all_ranks
        if rows != first and rows - batch <= _MOST_ADDED * batch:
            yield rows, constraints
