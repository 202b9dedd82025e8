"""An order of passes that is found for how long the passes of a plan take and what its ranks have memory for.

The named schedules take passes for equal. Here they are laid out by list scheduling with the plan's own seconds in
ticks (``autopar.ir.list_scheduling``), and the plan is cut into stages anew under what that keeps in flight. Several
numbers of microbatches alive, and of weight gradients put off, are tried on one stage a rank, two in a v, and as many
as the plan has; the best that fits is taken if it is faster. Neither the ops of the plan nor its mesh change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.list_scheduling import PassTimes
from autopar.search.outer.configuration import Candidate, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.problem.constraints import FOUND

# Ticks of the longest pass. Chosen: times are rounded to 1 %.
_TICKS = 100
# Share of a step's time that an order of its own has to save, as a plan with one is longer to read. Chosen.
_GAIN = 5e-3


def with_found_order(solver: Solver, found: Candidate) -> Candidate:
    """``found``, or a faster plan of the same ops on the same mesh with an order of its own; one in any case if the
    constraints ask for it and it fits."""
    configuration = found.configuration
    constraints = configuration.constraints
    pinned = constraints.schedule == FOUND
    if configuration.num_stages == 1 or configuration.num_microbatches == 1:
        return found
    if constraints.whole_backward or constraints.schedule not in (None, FOUND):
        return found
    best = None if pinned else found
    for other in _candidates(solver, found):
        if best is None or other.predicted.step_time_s < best.predicted.step_time_s * (1 - _GAIN * (best is found)):
            best = other
    return best or found


def _candidates(solver: Solver, found: Candidate) -> Iterator[Candidate]:
    """Plans that fit, each after another with equal passes, whose seconds its order is found for."""
    inner = Inner(
        pricing=found.pricing, assignment=found.assignment, objective=0.0, shared_once=False, given=found.priced
    )
    ranks, count = found.configuration.num_stages, found.configuration.num_microbatches
    for virtual, turns in _placements(found):
        for alive, waiting in ((ranks, ranks), (2 * ranks, ranks), (2 * ranks, 2 * ranks)):
            one = (1,) * (ranks * virtual)
            passes = PassTimes(
                forward=one,
                inputs=one,
                weights=one,
                alive=(min(alive, count),) * ranks,
                waiting=(min(waiting, count) * virtual,) * ranks,
            )
            configuration = replace(
                found.configuration, schedule=FOUND, virtual_stages=virtual, passes=passes, turns=turns
            )
            first = solver.filled(configuration, inner)
            if first is None:
                continue
            own = replace(configuration, passes=_timed(first, passes))
            candidate = solver.filled(own, inner)
            if candidate is not None:
                yield candidate


def _placements(found: Candidate) -> list[tuple[int, bool]]:
    """Stages a rank, and whether in a v."""
    configuration, constraints = found.configuration, found.configuration.constraints
    shape = configuration.pipelining
    tried = dict.fromkeys([(1, False), (2, True), (shape.virtual_stages, shape.in_a_v)])
    blocks = len(found.priced.blocks)
    return [
        (virtual, turns)
        for virtual, turns in tried
        if virtual * configuration.num_stages <= blocks and constraints.virtual_stages in (None, virtual)
    ]


def _timed(found: Candidate, passes: PassTimes) -> PassTimes:
    """``passes`` with the seconds that a plan is predicted to take for each, in ticks."""
    predicted = found.predicted
    sends = predicted.costs.sends
    unit = max(*predicted.forward_s, *predicted.inputs_s, *predicted.weights_s) / _TICKS

    def ticks(seconds: tuple[float, ...]) -> tuple[int, ...]:
        return tuple(max(1, round(own / unit)) for own in seconds)

    # The first stage has all of its backward in the second part.
    _, *inputs = ticks(predicted.inputs_s)
    first, *weights = ticks(predicted.weights_s)
    return replace(
        passes,
        forward=ticks(predicted.forward_s),
        inputs=(1, *inputs),
        weights=(max(1, first - 1), *weights),
        send=round(max(sends, default=0.0) / unit),
    )
