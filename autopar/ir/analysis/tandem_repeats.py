"""Maximal tandem repeats in a stream: stretches that run the same program again and again.

    embed | norm linear add | norm linear add | norm linear add | norm head

A stretch of ``count`` instances of ``period`` nodes repeats if the instances have equal tokens and are
wired alike. An operand is wired alike if it is

    local     the same distance away, inside its own instance
    carried   the same distance away, in the instance before (the first instance takes it from anywhere)
    shared    one and the same value for all instances, from before the first one (sources: from anywhere)

Candidates are the runs of positions ``i`` with ``token[i] == token[i + period]``, for every period:
O(n^2) comparisons, vectorised. They are taken greedily by the number of nodes that repetition saves, so the
layers of a model win over what repeats inside a layer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """``count`` instances of ``period`` stream nodes each, from position ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """Position behind the last repeat."""
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        """Nodes that need no analysis of their own."""
        return self.period * (self.count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The stream in which repeats are searched.

    tokens, reads, position, heavy: as in ``Stream``; values from ``len(tokens)`` on are sources.
    cut_cost: ranks cutting before a position, given the period; smaller is better, None forbids it.
    """

    tokens: Sequence[int]
    reads: Sequence[Sequence[int]]
    position: Sequence[int]
    heavy: Sequence[bool]
    cut_cost: Callable[[int, int], tuple[float, ...] | None]


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions ``start`` to ``end`` whose tokens have period ``period``."""

    start: int
    end: int
    period: int

    @property
    def saved(self) -> int:
        return (self.end - self.start) // self.period * self.period - self.period


def find_repeats(sequence: Wiring, *, end: int | None = None) -> list[Repeat]:
    """Disjoint repeats of at least two instances before position ``end``, in order.

    Every instance holds a heavy node that depends on the instance before it.
    """
    length = len(sequence.tokens) if end is None else end
    prefix = [0]
    for heavy in sequence.heavy:
        prefix.append(prefix[-1] + heavy)
    heap: list[tuple[int, int, int, int, Repeat | None]] = []

    def push(run: _Run, repeat: Repeat | None = None) -> None:
        saved = repeat.saved if repeat else run.saved
        if saved > 0 and prefix[run.end] > prefix[run.start]:
            heapq.heappush(heap, (-saved, run.period, run.start, run.end, repeat))

    for run in _runs(sequence.tokens[:length]):
        push(run)
    taken: list[Repeat] = []
    while heap:
        _, period, start, stop, repeat = heapq.heappop(heap)
        pieces = _free(start, stop, taken)
        if pieces != [(start, stop)]:
            for piece in pieces:
                push(_Run(*piece, period))
            continue
        if repeat is None:
            repeat = _best_rotation(sequence, _Run(start, stop, period), prefix)
            if repeat is not None:
                push(_Run(start, stop, period), repeat)
            continue
        taken.append(repeat)
        push(_Run(start, repeat.start, period))
        push(_Run(repeat.end, stop, period))
    return sorted(taken, key=lambda r: r.start)


def _runs(tokens: Sequence[int]) -> list[_Run]:
    """Every maximal stretch of each period that holds at least two instances."""
    values = torch.tensor(list(tokens), dtype=torch.int64)
    length = len(tokens)
    found: list[_Run] = []
    for period in range(1, length // 2 + 1):
        equal = values[:-period] == values[period:]
        if int(equal.sum()) < period:
            continue
        differs = torch.nonzero(~equal).flatten()
        edges = torch.cat([torch.tensor([-1]), differs, torch.tensor([length - period])])
        gaps = torch.nonzero(edges[1:] - edges[:-1] > period).flatten().tolist()
        found.extend(_Run(int(edges[gap]) + 1, int(edges[gap + 1]) + period, period) for gap in gaps)
    return found


def _free(start: int, end: int, taken: list[Repeat]) -> list[tuple[int, int]]:
    pieces = [(start, end)]
    for repeat in taken:
        pieces = (
            [
                part
                for a, b in pieces
                for part in ((a, min(b, repeat.start)), (max(a, repeat.end), b))
                if part[0] < part[1]
            ]
            if any(a < repeat.end and repeat.start < b for a, b in pieces)
            else pieces
        )
    return pieces


def _best_rotation(sequence: Wiring, run: _Run, prefix: list[int]) -> Repeat | None:
    """Where in ``run`` to start: most instances within one of the most, then the narrowest cut."""
    period = run.period
    breaks, starts = _breaks(sequence, run)
    options: list[tuple[int, int, tuple[float, ...]]] = []
    most = 0
    for start in starts:
        count = (run.end - start) // period
        for fits, limit in breaks:
            if limit >= start and not fits(start):
                count = min(count, (limit - start) // period + 1)
        if count < 2 or count < most - 1 or prefix[start + period] == prefix[start]:
            continue
        cost = sequence.cut_cost(start + period, period)
        if cost is None or not _carries(sequence, start, period):
            continue
        most = max(most, count)
        options.append((start, count, cost))
    options = [option for option in options if option[1] >= most - 1]
    if not options:
        return None
    start, count, _ = min(options, key=lambda o: (o[2][0], -o[1], *o[2][1:], -o[0]))
    return Repeat(start=start, period=period, count=count)


def _breaks(sequence: Wiring, run: _Run) -> tuple[list[tuple[Callable[[int], bool], int]], list[int]]:
    """Operands that are not simply the same distance away, and the starts worth trying.

    Each is a test that says whether the instances that start at a given position may pair position
    ``p`` with ``p + period``, and that ``p``.
    """
    period, sources = run.period, len(sequence.tokens)
    where = sequence.position
    breaks: list[tuple[Callable[[int], bool], int]] = []
    starts = set(range(run.start, min(run.start + period, run.end)))

    def carried(at: int, first: int, second: int) -> Callable[[int], bool]:
        return lambda start: at < start + period and first < start <= second < start + period

    def before(value: int) -> Callable[[int], bool]:
        return lambda start: value < start

    def reaches(at: int, distance: int) -> Callable[[int], bool]:
        return lambda start: (at - start) % period + period >= distance

    def restart(at: int) -> None:
        """The break at ``at`` may be left behind, or lie in the first instance."""
        starts.update(range(max(run.start, at - period + 1), min(at + period + 1, run.end)))

    for at in range(run.start, run.end - period):
        for a, b in zip(sequence.reads[at], sequence.reads[at + period], strict=True):
            distance = at - where[a]
            if distance == at + period - where[b]:
                if distance > period:
                    breaks.append((reaches(at, distance), at))
                    restart(at)
            elif a == b:
                if a < sources:
                    breaks.append((before(where[a]), at))
                    if where[a] >= run.start:
                        restart(where[a])
                        restart(at)
            else:
                breaks.append((carried(at, where[a], where[b]), at))
                restart(at)
    return breaks, sorted(starts)


def _carries(sequence: Wiring, start: int, period: int) -> bool:
    """Whether a heavy node of the second instance depends on what the first instance computes.

    Parallel branches (three projections of one input) follow each other in the stream, but do not.
    """
    middle = start + period
    later: set[int] = set()
    for at in range(middle, middle + period):
        if any(start <= value < middle or value in later for value in sequence.reads[at]):
            if sequence.heavy[at]:
                return True
            later.add(at)
    return False
