"""How long a step of a pipeline schedule takes: action by action, and in closed form.

The actions of a schedule are those of ``autopar.ir.schedule``, which the runtime executes as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.errors import InvalidPlan
from autopar.ir.pairs import paired
from autopar.ir.schedule import Action, Kind, Order, Pipelining, splits_backward

# Of a microbatch, or of each.
Seconds = float | Sequence[float]


class Event(NamedTuple):
    """An action with the time it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. ``events``: per rank, in order. ``peak_live``: per stage, most microbatches between
    their forward and the end of their backward at once.
    """

    events: tuple[tuple[Event, ...], ...]
    step_time_s: float
    peak_live: tuple[int, ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(event.end_s - event.start_s for event in rank) for rank in self.events)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they wait."""
        if self.step_time_s == 0:
            return 0.0
        return 1.0 - sum(self.busy_s) / (len(self.events) * self.step_time_s)


def simulate(
    shape: Pipelining,
    forward_s: Sequence[Seconds],
    backward_s: Sequence[Seconds],
    split_s: tuple[Sequence[Seconds], Sequence[Seconds]] | None = None,
    *,
    p2p_forward_s: Sequence[float] | float = 0.0,
    p2p_backward_s: Sequence[float] | float | None = None,
    hidden_s: Callable[[Action, Action], float] | None = None,
) -> Timeline:
    """Run a schedule on stages with these seconds a microbatch, the same of all or of each.

    backward_s: of a whole backward; split_s: of its parts, to the inputs and to the weights, where the schedule
    splits it (half each if not given). p2p_forward_s[i]: to send a microbatch from stage i to i + 1;
    p2p_backward_s[i]: its gradient back (as forward if not given). Stages of one rank send nothing to each other.
    Sends overlap with the sender's next action; what a rank sends, to whichever other, goes one after the other, and
    the receiver waits for it. hidden_s: of a forward and a backward that run at once (``autopar.ir.pairs``),
    seconds that they hide of each other. Raises InvalidPlan if there is no such schedule.
    """
    assert len(forward_s) == len(backward_s) == shape.num_stages, "seconds of every stage"
    count = shape.num_microbatches
    forward, backward = _each(forward_s, count), _each(backward_s, count)
    half: list[Sequence[float]] = [[seconds / 2 for seconds in own] for own in backward]
    inputs, weights = (half, half) if split_s is None else (_each(part, count) for part in split_s)
    seconds: dict[Kind, list[Sequence[float]]] = {"F": forward, "B": backward, "I": inputs, "W": weights}
    sends = _per_link(p2p_forward_s, shape)
    returns = sends if p2p_backward_s is None else _per_link(p2p_backward_s, shape)
    ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
    events = run_actions(shape.orders(), ranks, lambda kind: seconds[kind], sends, returns, hidden_s)
    return Timeline(
        events=events,
        step_time_s=max((rank[-1].end_s for rank in events if rank), default=0.0),
        peak_live=shape.live(),
    )


def _each(stages: Sequence[Seconds], count: int) -> list[Sequence[float]]:
    return [(own,) * count if isinstance(own, (int, float)) else own for own in stages]


def _per_link(seconds: Sequence[float] | float, shape: Pipelining) -> tuple[float, ...]:
    links = range(shape.num_stages - 1)
    given = (seconds,) * len(links) if isinstance(seconds, (int, float)) else seconds
    return tuple(0.0 if shape.rank_of(i) == shape.rank_of(i + 1) else given[i] for i in links)


def run_actions(
    orders: Sequence[Order],
    ranks: Sequence[int],
    seconds: Callable[[Kind], Sequence[Sequence[float]]],
    p2p_forward_s: Sequence[float],
    p2p_backward_s: Sequence[float],
    hidden_s: Callable[[Action, Action], float] | None = None,
) -> tuple[tuple[Event, ...], ...]:
    """Execute each rank's actions in its order, each as soon as its inputs have arrived.

    ranks: of each stage. seconds: kind -> of each microbatch in each stage. hidden_s: of a forward and a backward that
    run at once, if pairs do, seconds that they hide of each other; their events share what is left. O(actions). Raises
    InvalidPlan, showing where every rank stands, if the orders deadlock.
    """
    # A loop and no longest path: searches run thousands of schedules, and 4,096 actions take it 12 ms, a graph 57 ms.
    events: list[list[Event]] = [[] for _ in orders]
    forward_s, backward_s, inputs_s, weights_s = (seconds(kind) for kind in ("F", "B", "I", "W"))
    # (stage, microbatch) -> when its output, or the gradient of its input, is there; (backward, stage, microbatch) ->
    # when it is where it is needed next.
    outputs: dict[tuple[int, int], float] = {}
    gradients: dict[tuple[int, int], float] = {}
    sent: dict[tuple[bool, int, int], float] = {}
    # When each rank has sent all that it was given.
    idle = [0.0] * len(orders)
    sleeping: dict[tuple[bool, int, int], int] = {}
    free = [0.0] * len(orders)
    awake = list(range(len(orders)))
    last = len(ranks) - 1

    def send(backward: bool, stage: int, microbatch: int, end_s: float) -> None:
        """What ``stage`` has made goes to the next one, or to the one before."""
        other = stage - 1 if backward else stage + 1
        if 0 <= other <= last:
            sender = ranks[stage]
            taken = p2p_backward_s[other] if backward else p2p_forward_s[stage]
            arrival = end_s
            if taken:
                arrival = idle[sender] = max(end_s, idle[sender]) + taken
            sent[backward, stage, microbatch] = arrival

    pairs = [{} if hidden_s is None else dict(own for own in paired(order) if len(own) == 2) for order in orders]

    while awake:
        rank = awake.pop()
        order, ran, now = orders[rank], events[rank], free[rank]
        while len(ran) < len(order):
            action = order[len(ran)]
            stage, kind, microbatch = action
            ready = now
            back = pairs[rank].get(action)
            if back is not None:
                assert hidden_s is not None
                needed = [(False, stage - 1, microbatch)] if stage else []
                needed += [(True, back.stage + 1, back.microbatch)] if back.stage != last else []
                missing = next((key for key in needed if key not in sent), None)
                if missing is not None:
                    sleeping[missing] = rank
                    break
                start = max([now, *(sent[key] for key in needed)])
                alone_s = forward_s[stage][microbatch], backward_s[back.stage][back.microbatch]
                now = start + sum(alone_s) - hidden_s(action, back)
                between = start + (now - start) * alone_s[0] / (sum(alone_s) or 1.0)
                ran += [Event(action, start, between), Event(back, between, now)]
                outputs[stage, microbatch] = gradients[back.stage, back.microbatch] = now
                send(False, stage, microbatch, now)
                send(True, back.stage, back.microbatch, now)
                made = (False, stage, microbatch), (True, back.stage, back.microbatch)
                awake += [sleeping.pop(key) for key in made if key in sleeping]
                continue
            if kind == "F":
                if stage:
                    arrived = sent.get((False, stage - 1, microbatch))
                    if arrived is None:
                        sleeping[False, stage - 1, microbatch] = rank
                        break
                    ready = arrived
                end = max(now, ready) + forward_s[stage][microbatch]
                outputs[stage, microbatch] = end
                send(False, stage, microbatch, end)
                woken = sleeping.pop((False, stage, microbatch), None)
            elif kind == "W":
                if (stage, microbatch) not in gradients:
                    break
                end = now + weights_s[stage][microbatch]
                woken = None
            else:
                own = outputs.get((stage, microbatch))
                if own is None:
                    break
                ready = own
                if stage != last:
                    arrived = sent.get((True, stage + 1, microbatch))
                    if arrived is None:
                        sleeping[True, stage + 1, microbatch] = rank
                        break
                    ready = max(ready, arrived)
                end = max(now, ready) + (backward_s if kind == "B" else inputs_s)[stage][microbatch]
                gradients[stage, microbatch] = end
                send(True, stage, microbatch, end)
                woken = sleeping.pop((True, stage, microbatch), None)
            ran.append(Event(action, max(now, ready), end))
            now = end
            if woken is not None:
                awake.append(woken)
        free[rank] = now
    if any(len(ran) < len(order) for ran, order in zip(events, orders, strict=True)):
        raise InvalidPlan("the schedule deadlocks:\n" + _grid(orders, [len(ran) for ran in events]))
    return tuple(tuple(rank) for rank in events)


def _grid(orders: Sequence[Order], position: Sequence[int]) -> str:
    lines = []
    for rank, order in enumerate(orders):
        shown = [f">{a}<" if n == position[rank] else str(a) for n, a in enumerate(order)]
        lines.append(f"  rank {rank}: " + " ".join(shown))
    return "\n".join(lines)


def bubble_passes(schedule: str) -> float:
    """How long the ranks wait in all, in passes (forward and backward) of one stage through P - 1 of them.

    Exact for naive (M passes), gpipe, 1f1b and interleaved in whole rounds; for the zero-bubble schedules of what
    they are at equal times of F, I and W.
    """
    return 1 / 3 if splits_backward(schedule) else 1.0


def pipeline_time(shape: Pipelining, stage_s: Sequence[float], send_s: Sequence[float] = ()) -> float:
    """Seconds of a step in closed form.

    stage_s: of a microbatch in each stage, forward and backward; send_s: of what passes from each stage to the next and
    back, none if left out. One microbatch passes the stages, the others follow at an interval. With v stages on each of
    P ranks and a bubble of beta passes through P - 1 ranks

        naive       T = M (sum t + sum s)
        otherwise   T = beta / v sum t + sum s + (M - beta / v) interval

    where the interval is the longer of what a rank computes and what it sends for a microbatch (gpipe: what two send to
    each other, as all forwards come first). Stage i has no more than K_i microbatches between their forward and the end
    of their backward; so T is no less than the way of a microbatch to that stage and back, and M / K_i times its way
    from there to the last stage and back. Exact for equal stages of naive, gpipe, 1f1b and interleaved in whole rounds,
    where nothing is sent, and an estimate otherwise; ``simulate`` is the judge.
    """
    fill, rest = _fill_and_rest(shape)
    ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
    sends = [seconds if ranks[n] != ranks[n + 1] else 0.0 for n, seconds in enumerate(send_s)]
    computed, sent = [0.0] * shape.num_ranks, [0.0] * shape.num_ranks
    for rank, seconds in zip(ranks, stage_s, strict=True):
        computed[rank] += seconds
    for n, seconds in enumerate(sends):
        sent[ranks[n]] += seconds if shape.schedule == "gpipe" else seconds / 2
        sent[ranks[n + 1]] += 0.0 if shape.schedule == "gpipe" else seconds / 2
    if shape.schedule == "naive":
        return fill * (sum(stage_s) + sum(sends))
    way = sum(stage_s) + sum(sends)
    longest = fill * sum(stage_s) + sum(sends) + max(rest * max(computed), (shape.num_microbatches - 1) * max(sent))
    if any(sends):
        there_and_back = 0.0
        for n in reversed(range(shape.num_stages)):
            there_and_back += stage_s[n] + (sends[n] if n < len(sends) else 0.0)
            rounds = max(1.0, shape.num_microbatches / shape.live()[n])
            longest = max(longest, way + (rounds - 1) * there_and_back)
    return longest


def least_pipeline_time(shape: Pipelining, total_s: float, rank_s: float, sends: float) -> float:
    """Lower bound on ``pipeline_time`` of stages that compute for ``total_s`` seconds in all and send for ``sends``,
    where some rank computes for ``rank_s`` at least."""
    fill, rest = _fill_and_rest(shape)
    if shape.schedule == "naive":
        return fill * (total_s + sends)
    sent_s = (shape.num_microbatches - 1) * sends / shape.num_ranks
    return fill * total_s + sends + max(rest * max(rank_s, total_s / shape.num_ranks), sent_s)


def time_weights(shape: Pipelining) -> tuple[float, float]:
    """Weights of the sum and the maximum of the stages' seconds in what stage cuts minimise.

    It is ``pipeline_time`` where a rank has the longest stage and v - 1 of mean length: exact for one stage a rank, and
    for equal ones.
    """
    fill, rest = _fill_and_rest(shape)
    return fill + rest * (shape.virtual_stages - 1) / shape.num_stages, rest


def _fill_and_rest(shape: Pipelining) -> tuple[float, float]:
    """Weights of the sum of all stages' seconds and of those of the rank with most in ``pipeline_time``."""
    if shape.schedule == "naive":
        return float(shape.num_microbatches), 0.0
    fill = bubble_passes(shape.schedule) / shape.virtual_stages
    return fill, shape.num_microbatches - fill


def bubble_fraction(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Share of a step that equal stages wait: (P - 1) / (v M + P - 1) for gpipe, 1f1b (v = 1) and interleaved."""
    return (num_ranks - 1) / (virtual_stages * num_microbatches + num_ranks - 1)
