"""An order of passes that is found for how long the passes of a plan take and what its ranks have memory for.

The named schedules take passes for equal. Here they are laid out by list scheduling with the plan's own seconds in
ticks (``autopar.ir.list_scheduling``), and the plan is cut into stages anew under what that keeps in flight. Several
numbers of microbatches alive, and of weight gradients put off, are tried on one stage a rank, two in a v, and as many
as the plan has; the best that fits is taken if it is faster. Neither the ops of the plan nor its mesh change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from autopar.cost_model.schedule.pipeline_simulator import simulate
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.list_scheduling import PassTimes, Urgent
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.kept_sets import finds_sets
from autopar.search.outer.other_schedules import with_split_backward
from autopar.search.problem.constraints import FOUND

# Ticks of the longest pass. Chosen: times are rounded to 1 %.
_TICKS = 100
# Share of a step's time that an order of its own has to save, as a plan with one is longer to read. Chosen.
_GAIN = 5e-3
# Orders that stages are cut for. Chosen.
_TRIED = 4
# Other pipelines that an order is found for, and how much slower without it one of them may be: about as much as an
# order gains. Chosen.
_RIVALS, _MOST_TO_GAIN = 1, 0.1


def best_order(solver: Solver, best: Candidate, others: Iterable[Candidate]) -> Candidate:
    """``best``, or a faster plan of that or of the best of ``others``, which splits the backward or has an order of its
    own."""
    found = [with_found_order(solver, best)]
    if best.configuration.constraints.schedule == FOUND:
        return found[0]
    if not finds_sets(solver, best):  # with sets of kept tensors these schedules are tried later
        found.append(with_split_backward(solver, best))
    tried = {(best.configuration.num_stages, best.configuration.mesh.sizes)}
    for other in sorted((one for one in others if not one.pruned), key=lambda one: one.step_time_s):
        key = other.configuration.num_stages, other.configuration.mesh.sizes
        if len(tried) > _RIVALS or other.step_time_s > best.step_time_s * (1 + _MOST_TO_GAIN):
            break
        if key not in tried and other.configuration.num_stages > 1:
            tried.add(key)
            record_s = min(own.predicted.step_time_s for own in found)
            found.append(with_found_order(solver, other, record_s))
            if not finds_sets(solver, other):
                found.append(with_split_backward(solver, other))
    return min(found, key=lambda own: own.predicted.step_time_s)


def with_found_order(solver: Solver, found: Candidate, record_s: float = inf) -> Candidate:
    """``found``, or a faster plan of the same ops on the same mesh with an order of its own; one in any case if the
    constraints ask for it. record_s: of a plan that takes longer nothing need be known. Raises InfeasiblePlan if it
    then does not fit."""
    configuration = found.configuration
    constraints = configuration.constraints
    pinned = constraints.schedule == FOUND
    if not (pinned or solver.cluster.device.stack.any_order):
        return found
    if configuration.num_stages == 1 or (configuration.num_microbatches == 1 and not pinned):
        return found
    if constraints.schedule not in (None, FOUND):
        return found
    best = None if pinned else found

    def most_s() -> float:
        """Seconds of a step that another plan has to stay below."""
        return record_s if best is None else min(record_s, best.predicted.step_time_s * (1 - _GAIN * (best is found)))

    for other in _candidates(solver, found, most_s):
        if other.predicted.step_time_s < most_s():
            best = other
    if best is None:
        raise InfeasiblePlan(
            f"no order of passes that was tried for {configuration} fits; {configuration.schedule} does.\n"
            f"  try: --schedule {configuration.schedule}, or --remat full"
        )
    return best


def _candidates(solver: Solver, found: Candidate, most_s: Callable[[], float]) -> Iterator[Candidate]:
    """Plans that fit, first those whose order is best with equal stages and memory for all of it. most_s: of the best
    so far; what is slower even so is not tried."""
    inner = Inner.of(found)
    options = sorted(_options(found), key=lambda option: option[0])
    for ideal_s, configuration in options[:_TRIED]:
        if ideal_s >= most_s():
            break
        first = solver.filled(configuration, inner)
        if first is not None:
            assert configuration.passes is not None
            own = replace(configuration, passes=_timed(first, configuration.passes))
            candidate = solver.filled(own, inner)
            if candidate is not None:
                yield candidate


def _options(found: Candidate) -> Iterator[tuple[float, Configuration]]:
    """Orders of equal passes that take as long as those of ``found`` on average; seconds of a step by each."""
    configuration = found.configuration
    ranks, count = configuration.num_stages, configuration.num_microbatches
    blocks = [found.priced.blocks[b] for stage in found.stages for b in range(stage.first, stage.last + 1)]
    forward, backward = sum(found.predicted.forward_s), sum(found.predicted.backward_s)
    weights = sum(block.weights_s for block in blocks)
    send = max(found.predicted.costs.sends, default=0.0)
    for virtual, turns in _placements(found):
        stages = ranks * virtual
        each = [seconds / stages for seconds in (forward, backward - weights, weights)]
        for alive in dict.fromkeys(min(share * ranks * virtual, count) for share in (1, 2)):
            tried: tuple[tuple[int, Urgent], ...] = (
                (alive * virtual, "inputs"),
                (alive * virtual // 4, "inputs"),
                (2, "forwards"),
                (1, "forwards"),
            )
            for waiting, urgent in tried:
                passes = _passes(each, send, stages, (alive,) * ranks, (max(1, waiting),) * ranks, urgent)
                own = replace(configuration, schedule=FOUND, virtual_stages=virtual, passes=passes, turns=turns)
                parts = [0.0, *[each[1]] * (stages - 1)], [each[1] + each[2], *[each[2]] * (stages - 1)]
                whole = [each[1] + each[2]] * stages
                step = simulate(own.pipelining, [each[0]] * stages, whole, parts, p2p_forward_s=send)
                yield step.step_time_s, own


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
    seconds = predicted.forward_s, predicted.inputs_s, predicted.weights_s
    tick_s = max(map(max, seconds)) / _TICKS
    # The first stage has all of its backward in the weight-gradient pass (``work_of``).
    forward, (_, *inputs), (first, *weights) = ([max(1, round(own / tick_s)) for own in each] for each in seconds)
    return replace(
        passes,
        forward=tuple(forward),
        inputs=(1, *inputs),
        weights=(max(1, first - 1), *weights),
        send=round(max(predicted.costs.sends, default=0.0) / tick_s),
    )


def _passes(
    each: Sequence[float], send: float, stages: int, alive: tuple[int, ...], waiting: tuple[int, ...], urgent: Urgent
) -> PassTimes:
    """Of equal stages. each: seconds of a forward, an input-gradient and a weight-gradient pass."""
    tick_s = max(each) / 10
    forward, inputs, weights = (max(1, round(own / tick_s)) for own in each)
    return PassTimes(
        send=round(send / tick_s),
        forward=(forward,) * stages,
        inputs=(1, *[inputs] * (stages - 1)),
        weights=(inputs + weights - 1, *[weights] * (stages - 1)),
        alive=alive,
        waiting=waiting,
        urgent=urgent,
    )
