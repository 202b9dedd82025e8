"""Tasks on the streams of many ranks, each run as soon as the tasks that it waits for have ended.

A rank has a stream for compute and some for communication. The tasks of a stream run one after another in the order in
which they were added, as on a GPU; a task also waits for others, of any stream and rank. What runs at once on a rank
slows each other down:

    n communications    each has an n-th of its speed: they share the network
    compute             1 / (1 + slowdown) of its speed, of that of them which slows it down most

so a task has so many seconds of work, and how long that takes depends on what runs beside it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir.errors import InvalidPlan

COMPUTE = "compute"

# Work that is left after rounding.
_NOTHING_S = 1e-12


class Span(NamedTuple):
    """A task that ran. work_s: seconds it would have taken alone. task: its number; after: those of the tasks that had
    to end first, the one before it in its stream among them."""

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float
    work_s: float
    task: int
    after: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


class _Task(NamedTuple):
    rank: int
    stream: str
    name: str
    work_s: float
    after: tuple[int, ...]
    slowdown: float


@dataclass(slots=True)
class _Rank:
    """Streams of a rank: what is queued, and what runs with the work that it has left at ``time_s``. slowdown: of
    compute, by each stream that runs."""

    queues: dict[str, list[int]] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple[int, float]] = field(default_factory=dict)
    slowdown: dict[str, float] = field(default_factory=dict)
    time_s: float = 0.0
    version: int = 0

    def speed(self, stream: str) -> float:
        communications = len(self.running) - (COMPUTE in self.running)
        if stream == COMPUTE:
            return 1.0 / (1.0 + max(self.slowdown.values(), default=0.0))
        return 1.0 / communications

    def advance(self, now: float) -> None:
        """Do the work of the time until ``now``."""
        past = now - self.time_s
        if past > 0:
            self.running = {s: (task, left - past * self.speed(s)) for s, (task, left) in self.running.items()}
        self.time_s = now

    def next_end(self) -> float | None:
        """When the first of the running tasks ends, if nothing changes."""
        ends = [self.time_s + max(0.0, left) / self.speed(stream) for stream, (_, left) in self.running.items()]
        return min(ends, default=None)


@dataclass(slots=True)
class Streams:
    """Tasks to be run. Those of one stream are added in its order."""

    _tasks: dict[int, _Task] = field(default_factory=dict)
    _waits: dict[int, int] = field(default_factory=dict)
    _followers: dict[int, list[int]] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _reserved: int = 0

    def reserve(self) -> int:
        """The number of a task that is added later, for others to wait for."""
        self._reserved += 1
        return self._reserved

    def add(
        self,
        rank: int,
        stream: str,
        name: str,
        work_s: float,
        after: Iterable[int] = (),
        number: int | None = None,
        slowdown: float = 0.0,
    ) -> int:
        """A task that waits for those of the numbers ``after``. number: reserved for it. slowdown: how much longer
        compute takes beside it. Returns its number."""
        number = self.reserve() if number is None else number
        waits = set(after)
        self._waits[number] = len(waits)
        for other in waits:
            self._followers.setdefault(other, []).append(number)
        queue = self._ranks.setdefault(rank, _Rank()).queues.setdefault(stream, [])
        self._tasks[number] = _Task(rank, stream, name, work_s, tuple(waits.union(queue[-1:])), slowdown)
        queue.append(number)
        return number

    def run(self) -> list[Span]:
        """Every task with the time it ran, in the order of their ends. Time O(n log n).

        Raises InvalidPlan if tasks wait for each other.
        """
        # No question to a graph: what runs beside a task says how long it takes, so time has to pass for all at once.
        waits = dict(self._waits)
        began: dict[int, float] = {}
        spans: list[Span] = []
        heap: list[tuple[float, int, int]] = []
        for number, rank in self._ranks.items():
            rank.position = dict.fromkeys(rank.queues, 0)
            rank.running, rank.slowdown, rank.time_s, rank.version = {}, {}, 0.0, 0
            self._begin(number, rank, 0.0, waits, began, heap)
        while heap:
            now, number, version = heapq.heappop(heap)
            rank = self._ranks[number]
            if version != rank.version:
                continue
            rank.advance(now)
            touched = {number}
            for stream, (task, left) in list(rank.running.items()):
                if left <= _NOTHING_S:
                    del rank.running[stream]
                    rank.slowdown.pop(stream, None)
                    rank.position[stream] += 1
                    _, _, name, work_s, after, _ = self._tasks[task]
                    spans.append(Span(number, stream, name, began[task], now, work_s, task, after))
                    for follower in self._followers.get(task, ()):
                        waits[follower] -= 1
                        touched.add(self._tasks[follower].rank)
            for other in touched:
                self._begin(other, self._ranks[other], now, waits, began, heap)
        if len(spans) < len(self._tasks):
            stuck = next(task for number, task in self._tasks.items() if number not in began)
            raise InvalidPlan(f"the step deadlocks: {stuck.name} on rank {stuck.rank} waits for what never ends")
        return spans

    def _begin(
        self,
        number: int,
        rank: _Rank,
        now: float,
        waits: dict[int, int],
        began: dict[int, float],
        heap: list[tuple[float, int, int]],
    ) -> None:
        """Start what can start on a rank, and say when something there ends."""
        rank.advance(now)
        for stream, queue in rank.queues.items():
            position = rank.position[stream]
            if stream not in rank.running and position < len(queue) and not waits[queue[position]]:
                began[queue[position]] = now
                task = self._tasks[queue[position]]
                rank.running[stream] = queue[position], task.work_s
                rank.slowdown[stream] = task.slowdown
        rank.version += 1
        end = rank.next_end()
        if end is not None:
            heapq.heappush(heap, (end, number, rank.version))
