"""Pipeline passes ordered by list scheduling: each rank, whenever it is free, runs the most urgent pass that it can.

In the order of urgency: an input gradient (I), which the stage before waits for; a forward (F), which the stage after
waits for; gradients of weights (W), which nobody waits for and which fill what would be gaps. The first stage has no
input gradient to send: its backward is one pass, as urgent as weight gradients. Of several stages on a rank a forward
of the one furthest along goes first, and an input gradient of the oldest microbatch. Where few weight gradients can
be put off, gaps are shorter with forwards first, or rather the pass first that most is left to do after.

    rank 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 ...        of 2 ranks, passes of equal length and 4 microbatches alive on each
    rank 1      F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 ...

How long passes take and how many microbatches ranks have memory for is given, in ticks and numbers, so that plans,
simulator and runtime have the same order. Zero Bubble (Qi et al., arXiv:2401.10241, section 3) orders passes so by
profiled times; its ZB-2p is the case of equal passes, one stage a rank and twice as many microbatches as ranks
(docs/decisions/0025 compares it with other settings).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

Urgent = Literal["inputs", "forwards"]
PassKind = Literal["F", "I", "W"]
Pass = tuple[int, PassKind, int]
"""Stage, kind, microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """What an order of passes is found for.

    forward, inputs, weights: ticks of a pass of each stage, at least 1. alive: of each rank, the most microbatches from
    their first forward there to their last weight gradients, at least 1. waiting: of each rank, the most passes of
    weight gradients that are put off. send: ticks until another rank has what a pass made. urgent: what goes first.
    """

    forward: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    alive: tuple[int, ...]
    waiting: tuple[int, ...]
    send: int = 0
    urgent: Urgent = "inputs"

    @classmethod
    def equal(cls, num_ranks: int, num_microbatches: int, most_alive: int) -> PassTimes:
        """Of one stage a rank and passes of equal length, any number of which may wait."""
        one = (1,) * num_ranks
        return cls(
            forward=one,
            inputs=one,
            weights=one,
            alive=(most_alive,) * num_ranks,
            waiting=(num_microbatches,) * num_ranks,
        )


@lru_cache(maxsize=64)
def list_schedule(ranks: tuple[int, ...], num_microbatches: int, times: PassTimes) -> tuple[tuple[Pass, ...], ...]:
    """The passes of every rank, in order. ranks: that each stage is on. O(passes log ranks)."""
    return _Run(ranks, num_microbatches, times).orders()


class _Run:
    """A step, as it is laid out. What a pass makes is there once the pass has ended."""

    def __init__(self, ranks: tuple[int, ...], num_microbatches: int, times: PassTimes) -> None:
        self.ranks, self.count, self.times = ranks, num_microbatches, times
        stages, places = range(len(ranks)), range(max(ranks) + 1)
        self.own = [[stage for stage in stages if ranks[stage] == rank] for rank in places]
        # Passes of each stage that have begun, and what has come to it: activations, gradients.
        self.forwards, self.inputs, self.weights = ([0] * len(ranks) for _ in range(3))
        self.arrived = [num_microbatches if stage == 0 else 0 for stage in stages]
        self.returned = [0] * len(ranks)
        # Of each rank: stages whose weight gradients wait, oldest first.
        self.waiting: list[deque[int]] = [deque() for _ in places]
        # Ticks of the way back from each stage, and from each stage to the last and all the way back.
        self.back = list(accumulate(times.inputs))
        self.ahead = [self.back[-1] + sum(times.forward[stage:]) for stage in stages]
        self.found: list[list[Pass]] = [[] for _ in places]

    def orders(self) -> tuple[tuple[Pass, ...], ...]:
        """Lay out the whole step."""
        free = [0] * len(self.own)
        events: list[tuple[int, int, int, bool]] = [(0, rank, -1, False) for rank in range(len(self.own))]
        left = len(self.ranks) * self.count
        while left:
            now = events[0][0]
            woken = set()
            while events and events[0][0] == now:
                _, rank, stage, forward = heapq.heappop(events)
                woken.add(rank)
                if stage >= 0:
                    (self.arrived if forward else self.returned)[stage] += 1
            for rank in sorted(woken):
                if free[rank] > now or (chosen := self._choose(rank)) is None:
                    continue
                stage, kind = chosen
                ticks = self._begin(rank, stage, kind)
                left -= kind == "W"
                free[rank] = end = now + ticks
                heapq.heappush(events, (end, rank, -1, False))
                other = {"F": stage + 1, "I": stage - 1}.get(kind, -1)
                if kind == "F" and other == len(self.ranks):
                    heapq.heappush(events, (end, rank, stage, False))  # the last stage has its own gradient
                elif other >= 0:
                    there = self.ranks[other]
                    heapq.heappush(events, (end + self.times.send * (there != rank), there, other, kind == "F"))
        return tuple(map(tuple, self.found))

    def _choose(self, rank: int) -> tuple[int, PassKind] | None:
        """The most urgent pass that a rank can run."""
        own, waiting = self.own[rank], self.waiting[rank]
        back = [s for s in own if self.inputs[s] < min(self.forwards[s], self.returned[s])]
        later = min((s for s in back if s), key=lambda s: (self.inputs[s], -s), default=0)
        forward = self._forward(rank)
        if later and forward is not None and self.times.urgent == "forwards" and self.ahead[forward] > self.back[later]:
            return forward, "F"
        if later:
            full = waiting and len(waiting) >= self.times.waiting[rank]
            return (waiting[0], "W") if full else (later, "I")
        if forward is not None:
            return forward, "F"
        if back:
            return 0, "W"
        return (waiting[0], "W") if waiting else None

    def _forward(self, rank: int) -> int | None:
        """The stage of a rank whose next forward can run, the one furthest along."""
        own = self.own[rank]
        alive = self.forwards[own[0]] - min(self.weights[stage] for stage in own)
        for stage in reversed(own):
            if self.forwards[stage] < self.arrived[stage] and (stage != own[0] or alive < self.times.alive[rank]):
                return stage
        return None

    def _begin(self, rank: int, stage: int, kind: PassKind) -> int:
        """Note a pass; its ticks."""
        order, times = self.found[rank], self.times
        if kind == "F":
            order.append((stage, "F", self.forwards[stage]))
            self.forwards[stage] += 1
            return times.forward[stage]
        if kind == "I":
            order.append((stage, "I", self.inputs[stage]))
            self.inputs[stage] += 1
            self.waiting[rank].append(stage)
            return times.inputs[stage]
        if stage == 0:
            order.append((stage, "I", self.inputs[stage]))
            self.inputs[stage] += 1
        else:
            self.waiting[rank].remove(stage)
        order.append((stage, "W", self.weights[stage]))
        self.weights[stage] += 1
        return times.weights[stage] + (times.inputs[stage] if stage == 0 else 0)
