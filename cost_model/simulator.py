"""Pipeline schedules: which action runs when on every stage, and how long a step takes.

Actions are spelt as in ``torch.distributed.pipelining``: ``2F0`` is stage 2, forward, microbatch 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir.errors import InvalidPlan

Direction = Literal["F", "B"]
_ACTION = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one microbatch through one stage."""

    stage: int
    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.direction}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` printed. Raises InvalidPlan."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise InvalidPlan(f"{text!r} is not a pipeline action; expected stage, F or B, microbatch: '2F0'")
        direction: Direction = "F" if match[2] == "F" else "B"
        return cls(int(match[1]), direction, int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action with the time it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. ``events``: per stage, in order. ``peak_live``: per stage, most microbatches between
    their forward and the end of their backward at once.
    """

    events: tuple[tuple[Event, ...], ...]
    step_time_s: float
    peak_live: tuple[int, ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each stage computes."""
        return tuple(sum(event.end_s - event.start_s for event in stage) for stage in self.events)

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time in which they wait."""
        if self.step_time_s == 0:
            return 0.0
        return 1.0 - sum(self.busy_s) / (len(self.events) * self.step_time_s)


def action_order(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """What one stage does, in order.

    gpipe: all forwards, then all backwards. 1f1b: ``num_stages - stage`` forwards to fill the pipeline (the
    last of them is followed by the first backward), then a backward and a forward in turn, then the rest.
    """
    count = num_microbatches
    if schedule == "gpipe":
        return tuple([Action(stage, "F", m) for m in range(count)] + [Action(stage, "B", m) for m in range(count)])
    if schedule != "1f1b":
        raise InvalidPlan(f"unknown schedule {schedule!r}; known: gpipe, 1f1b")
    warmup = min(count, num_stages - stage)
    order = [Action(stage, "F", m) for m in range(warmup)]
    for microbatch in range(count):
        order.append(Action(stage, "B", microbatch))
        if warmup + microbatch < count:
            order.append(Action(stage, "F", warmup + microbatch))
    return tuple(order)


def simulate(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    *,
    p2p_forward_s: Sequence[float] | float = 0.0,
    p2p_backward_s: Sequence[float] | float | None = None,
) -> Timeline:
    """Run ``schedule`` on stages with these seconds a microbatch.

    p2p_forward_s[i]: to send a microbatch from stage i to i + 1; p2p_backward_s[i]: its gradient back (as
    forward if not given). Sends overlap with the sender's next action; the receiver waits for them.
    """
    orders = [action_order(schedule, i, len(forward_s), num_microbatches) for i in range(len(forward_s))]
    sends = _per_link(p2p_forward_s, len(forward_s))
    returns = sends if p2p_backward_s is None else _per_link(p2p_backward_s, len(forward_s))
    return run_actions(orders, forward_s, backward_s, sends, returns)


def _per_link(seconds: Sequence[float] | float, num_stages: int) -> tuple[float, ...]:
    return (seconds,) * (num_stages - 1) if isinstance(seconds, (int, float)) else tuple(seconds)


def run_actions(
    orders: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_forward_s: Sequence[float],
    p2p_backward_s: Sequence[float],
) -> Timeline:
    """Execute each stage's actions in its order as early as what they wait for allows.

    O(actions). Raises InvalidPlan, showing where every stage stands, if the orders deadlock.
    """
    num_stages = len(orders)
    ends: dict[Action, float] = {}
    events: list[list[Event]] = [[] for _ in orders]
    free = [0.0] * num_stages
    position = [0] * num_stages
    # A stage is looked at again when the neighbour it may wait for has moved on.
    waiting = list(range(num_stages))
    while waiting:
        stage = waiting.pop()
        moved = False
        while position[stage] < len(orders[stage]):
            action = orders[stage][position[stage]]
            ready = _ready(action, num_stages, ends, p2p_forward_s, p2p_backward_s)
            if ready is None:
                break
            start = max(free[stage], ready)
            end = start + (forward_s[stage] if action.direction == "F" else backward_s[stage])
            ends[action] = free[stage] = end
            events[stage].append(Event(action=action, start_s=start, end_s=end))
            position[stage] += 1
            moved = True
        if moved:
            waiting.extend(s for s in (stage - 1, stage + 1) if 0 <= s < num_stages)
    if any(position[s] < len(orders[s]) for s in range(num_stages)):
        raise InvalidPlan("the schedule deadlocks:\n" + _grid(orders, position))
    return Timeline(
        events=tuple(tuple(stage) for stage in events),
        step_time_s=max(free, default=0.0),
        peak_live=tuple(_peak_live(order) for order in orders),
    )


def _ready(
    action: Action,
    num_stages: int,
    ends: Mapping[Action, float],
    p2p_forward_s: Sequence[float],
    p2p_backward_s: Sequence[float],
) -> float | None:
    """When the inputs of ``action`` are there; None if that is not known yet."""
    stage, microbatch = action.stage, action.microbatch
    if action.direction == "F":
        if stage == 0:
            return 0.0
        sent = ends.get(Action(stage - 1, "F", microbatch))
        return None if sent is None else sent + p2p_forward_s[stage - 1]
    own = ends.get(Action(stage, "F", microbatch))
    if stage == num_stages - 1 or own is None:
        return own
    sent = ends.get(Action(stage + 1, "B", microbatch))
    return None if sent is None else max(own, sent + p2p_backward_s[stage])


def _grid(orders: Sequence[Sequence[Action]], position: Sequence[int]) -> str:
    lines = []
    for stage, order in enumerate(orders):
        shown = [f">{a}<" if n == position[stage] else str(a) for n, a in enumerate(order)]
        lines.append(f"  stage {stage}: " + " ".join(shown))
    return "\n".join(lines)


def _peak_live(order: Sequence[Action]) -> int:
    live = peak = 0
    for action in order:
        live += 1 if action.direction == "F" else -1
        peak = max(peak, live)
    return peak


def live_microbatches(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Most microbatches whose activations stage ``stage`` holds at once: all in gpipe, min(M, P - i) in 1f1b."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


def pipeline_time(
    schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, *, p2p_s: float = 0.0
) -> float:
    """Seconds of a step in closed form, for stages with these seconds a microbatch.

    One microbatch passes every stage once each way, the others follow at the pace of the slowest stage:

        gpipe   T = sum f + (M - 1) max f  +  sum b + (M - 1) max b  +  2 (P - 1) p2p
        1f1b    T = sum (f + b) + (M - 1) max (f + b)  +  2 (P - 1) p2p

    gpipe's is exact. 1f1b's is exact for equal stages and p2p = 0 and an estimate otherwise; ``simulate`` is the
    judge.
    """
    rest = num_microbatches - 1
    sending = 2 * (len(forward_s) - 1) * p2p_s
    if schedule == "gpipe":
        return sum(forward_s) + rest * max(forward_s) + sum(backward_s) + rest * max(backward_s) + sending
    stages = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    return sum(stages) + rest * max(stages) + sending


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Share of a step that equal stages wait, gpipe or 1f1b: (P - 1) / (M + P - 1)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
