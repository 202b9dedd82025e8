"""The best rematerialisation for every range of blocks that could be a stage, all ranges at once.

The first blocks of a range are at level full, the next at one of the other levels, and the rest keep everything; or,
where there are sets of tensors to keep beside the levels, the first blocks at one level or set and the rest at another.
Sets that are best at rising prices of memory keep less and take longer, block by block, so of two of them, or of all
blocks at one, the fewest blocks that have to keep less are best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.rematerialisation import LEVELS
from autopar.search.assign.instance import Floats, Ints
from autopar.search.stages.stage import FULL, BlockCost, Stage

# (range, block) and (range, pair of levels) pairs that are looked at together. Chosen: 8 MiB an array, so that numpy's
# call costs nothing beside its work and memory stays small. It changes no result.
_CHUNK = 1 << 20


class Limit(NamedTuple):
    """What a stage may take. live: microbatches whose activations it saves; waiting: others, of which it has only the
    gradients of weights left to compute. budget: bytes. saved: bytes of the activations of both."""

    live: int
    waiting: int
    budget: float
    saved: float = np.inf


@dataclass(frozen=True, slots=True)
class Fitting:
    """Ranges (columns) that may fit into a limit (rows), at any time. limits: of each stage. rows: of each of them."""

    ranges: Ranges
    limits: Sequence[Limit]
    rows: dict[Limit, int]
    fits: NDArray[np.bool_]

    def cover(self) -> bool:
        """Whether stages that may fit cover all blocks. Each takes as many as it can: part of a range that fits,
        fits."""
        end, known = 0, self.ranges.known
        for limit in self.limits:
            end += int(np.count_nonzero(self.fits[self.rows[limit]][known[end, end + 1 :]]))
        return end >= self.ranges.n


@dataclass(frozen=True, slots=True)
class Solved:
    """For the limits of a stage (rows) and every range (columns; the last is no range): the least seconds, inf where
    nothing fits or it is too long, and the levels for that."""

    ranges: Ranges
    rows: dict[Limit, int]
    times: Floats
    full: Ints
    partly: Ints
    middle: Ints
    rest: Ints

    def of(self, limit: Limit) -> Floats:
        """Seconds of the ranges, by number as in ``Ranges.known``."""
        return np.asarray(self.times[self.rows[limit]])

    def stage(self, begin: int, end: int, limit: Limit) -> Stage:
        """The best use of levels for a range."""
        at = self.rows[limit], self.ranges.known[begin, end]
        full, partly = int(self.full[at]), int(self.partly[at])
        counts = (FULL, full), (int(self.middle[at]), partly), (int(self.rest[at]), end - begin - full - partly)
        remat = tuple((level, count) for level, count in counts if level and count)
        return Stage(first=begin, last=end - 1, remat=remat)


class _Wanted(NamedTuple):
    """Ranges by ``number`` in the limits of ``live``, ``waiting``, ``budget`` and ``most`` bytes saved, each with its
    place in the tables."""

    place: Ints
    number: Ints
    live: Ints
    waiting: Ints
    budget: Floats
    most: Floats

    def only(self, these: NDArray[np.bool_]) -> _Wanted:
        """Some of them."""
        counts = self.place[these], self.number[these], self.live[these], self.waiting[these]
        return _Wanted(*counts, self.budget[these], self.most[these])


class _Change(NamedTuple):
    """Of a level, sums over the blocks before each: how many seconds more and bytes less it takes than none, how many
    more level full takes than it; whether each block at it takes no more memory and no less time than at none."""

    extra_s: Floats
    spared: Floats
    full_s: Floats
    full_saved: Floats
    monotonous: bool

    @classmethod
    def of(cls, level: int, time: Sequence[Floats], saved: Sequence[Floats]) -> _Change:
        extra_s, spared = time[level] - time[0], saved[0] - saved[level]
        monotonous = bool(np.all(np.diff(spared) >= 0) and np.all(np.diff(extra_s) >= 0))
        return cls(extra_s, spared, time[3] - time[level], saved[3] - saved[level], monotonous)


class _Pairs(NamedTuple):
    """Pairs of levels or sets for the first and for the last blocks of a range: ``less`` is kept of the first, ``more``
    of the last. By pair, sums over the blocks before each: seconds and bytes at ``more``, and how many seconds more and
    bytes less ``less`` takes; and by number of a range, what is held while one of its blocks is recomputed."""

    less: Ints
    more: Ints
    time: Floats
    saved: Floats
    extra: Floats
    spared: Floats
    recomputed: Floats


class _Tables(NamedTuple):
    """The best of each place: seconds, blocks at level full, blocks at the level ``middle``, and level of the rest."""

    best: Floats
    full: Ints
    partly: Ints
    middle: Ints
    rest: Ints

    def rematerialised(self, place: Ints) -> NDArray[np.bool_]:
        """Whether nothing is found yet, or something that is rematerialised."""
        return ~np.isfinite(self.best[place]) | (self.full[place] + self.partly[place] > 0)


class Ranges:
    """Ranges [a, b) of blocks, those that differ by number: ``known[a, b]`` is that of [a, b).

    With m the end of the fully and k the end of the partly rematerialised blocks, a <= m <= k <= b, time and saved
    bytes are sums over prefixes: both separate into a term of m, one of k, and one of the range. The level of the
    blocks between m and k is tried both ways.
    """

    def __init__(self, blocks: tuple[BlockCost, ...], levels: tuple[str, ...]) -> None:
        self.n = len(blocks)
        self.fastest = _prefix([min(b.time_s) for b in blocks])
        self.blocks = blocks
        every = range(len(blocks[0].time_s))
        self.allowed = [level in levels for level in LEVELS] + [True] * (len(every) - len(LEVELS))
        self.costly = all(block.time_s[0] <= min(block.time_s) for block in blocks)
        self.time = [_prefix([b.time_s[level] for b in blocks]) for level in every]
        self.saved = [_prefix([b.saved_bytes[level] for b in blocks]) for level in every]
        self.changes = [_Change.of(level, self.time, self.saved) for level in range(3)]
        # The least that blocks keep if none keeps less than at a level.
        order = sorted(every, key=lambda level: -self.saved[level][-1]) if len(every) > len(LEVELS) else every
        usable = [[other for other in order[: order.index(level) + 1] if self.allowed[other]] for level in every]
        self.least = [
            _prefix([min(b.saved_bytes[other] for other in own) for b in blocks]) if own else None for own in usable
        ]
        self.static = _prefix([b.static_bytes for b in blocks])
        self.delayed = _prefix([b.delayed_bytes for b in blocks])
        self.begins, self.ends, self.known = _distinct(_runs(blocks))
        self.workspace = self._largest([b.workspace_bytes for b in blocks])
        self.recomputed = [self._largest([b.recomputed_bytes(level) for b in blocks]) for level in every]

    def _largest(self, values: Sequence[float]) -> Floats:
        """Of the values in each range that differs."""
        bounds = np.column_stack([self.begins, self.ends]).ravel()
        return np.asarray(np.maximum.reduceat(np.array([*values, -np.inf]), bounds)[::2])

    def reach(self, bound: float) -> Ints:
        """[a]: the end of the longest range from a on that may take less than ``bound`` seconds."""
        if np.isinf(bound):
            return np.full(self.n + 1, self.n)
        ends = np.searchsorted(self.fastest, self.fastest + bound * (1 + 1e-9), side="right") - 1
        return np.asarray(ends, dtype=np.int64)

    def fitting(self, limits: Sequence[Limit]) -> Fitting:
        """The ranges that may fit into the limits of some stage."""
        rows, begins, ends = {limit: row for row, limit in enumerate(dict.fromkeys(limits))}, self.begins, self.ends
        live, waiting, budget, most = (np.array(column)[:, None] for column in zip(*rows, strict=True))
        fixed, most = self._fixed(begins, ends, waiting) + self.workspace, most - self._delayed(begins, ends, waiting)
        fits = np.zeros((len(rows), len(begins) + 1), dtype=bool)
        for level, least in enumerate(self.least):
            if least is not None and self.allowed[level]:
                room = budget * (1 + 2e-9) + 2e-6 - fixed - self.recomputed[level]
                fits[:, :-1] |= live * (least[ends] - least[begins]) <= np.minimum(room, most)
        return Fitting(self, limits, rows, fits)

    def solve(self, fitting: Fitting, bound: float) -> Solved:
        """The ranges that may fit and take less than ``bound`` seconds."""
        begins, ends, shape = self.begins, self.ends, fitting.fits.shape
        best = np.full(shape, np.inf)
        full, partly, middle, rest = (np.zeros(shape, dtype=np.int64) for _ in range(4))
        live, waiting, budget, most = (np.array(column) for column in zip(*fitting.rows, strict=True))
        wanted = np.nonzero(fitting.fits[:, :-1] & (ends <= self.reach(bound)[begins]))
        longest = int((ends - begins)[wanted[1]].max(initial=0))
        tables = _Tables(best.reshape(-1), *(table.reshape(-1) for table in (full, partly, middle, rest)))
        each = max(longest, len(self.pairs.less))
        for row, number in zip(*(np.array_split(w, 1 + len(w) * each // _CHUNK) for w in wanted), strict=True):
            some = _Wanted(row * shape[1] + number, number, live[row], waiting[row], budget[row], most[row])
            self._solve_some(some, tables)
            self._solve_pairs(some, tables)
        return Solved(self, fitting.rows, best, full, partly, middle, rest)

    def _solve_some(self, some: _Wanted, tables: _Tables) -> None:
        """Fill in the tables for ``some``, with levels."""
        length = int((self.ends - self.begins)[some.number].max(initial=0))
        for use_full, level in product((False, True), range(3)):
            if (use_full and not self.allowed[3]) or (level and not self.allowed[level]):
                continue
            if not self.allowed[0] and not (use_full or level):
                continue
            if self.costly and (use_full or level):
                # What fits without rematerialisation is best without it.
                some = some.only(tables.rematerialised(some.place))
            place, number, lives, waiting, budgets, most = some
            if not len(place):
                return
            change = self.changes[level]
            begin, end, live = self.begins[number, None], self.ends[number, None], lives[:, None]
            fixed = self._fixed(begin, end, waiting[:, None]) + self.workspace[number, None]
            used = [own for own, uses in ((level, True), (3, use_full)) if uses]
            room = budgets[:, None] - fixed - np.maximum.reduce([self.recomputed[own][number, None] for own in used])
            room = np.minimum(room, most[:, None] - self._delayed(begin, end, waiting[:, None]))
            room = room + 1e-9 * np.abs(room) + 1e-6
            m = begin + (np.arange(1, length + 1) if use_full else np.zeros(1, dtype=np.int64))
            inside = m <= end
            m = np.minimum(m, end)
            if not self.allowed[0] and not level:
                m, inside = end, np.ones((len(place), 1), dtype=bool)
            # Seconds and bytes of one microbatch, but for what depends on k.
            time_s = self.time[0][end] - self.time[3][begin] + change.full_s[m]
            saved = self.saved[0][end] - self.saved[3][begin] + change.full_saved[m]
            candidates: list[Ints]
            if not self.allowed[0]:
                # Every block is rematerialised: the middle part reaches to the end, or there is none.
                candidates = [np.broadcast_to(end, m.shape)]
            elif not level:
                candidates = [m]
            elif change.monotonous:
                # More blocks at that level take less memory and more time: the fewest that fit are best.
                with np.errstate(divide="ignore"):  # of no microbatch everything is saved
                    least = saved - room / live
                k = np.searchsorted(change.spared, least)
                candidates = [np.minimum(np.maximum(k, m + 1), self.n)]
            else:
                candidates = [np.minimum(m + more, self.n) for more in range(1, length + 1)]
            for k in candidates:
                fits = inside & (k <= end) & (live * (saved - change.spared[k]) <= room)
                fits &= (k > m) if level else (k == m)
                seconds = np.where(fits, time_s + change.extra_s[k], np.inf)
                column = seconds.argmin(axis=1)
                rows = np.arange(len(place))
                better = seconds[rows, column] < tables.best[place]
                at = place[better]
                tables.best[at] = seconds[rows, column][better]
                tables.full[at] = m[rows, column][better] - begin[better, 0]
                tables.partly[at] = (k - m)[rows, column][better]
                tables.middle[at] = level

    def _solve_pairs(self, some: _Wanted, tables: _Tables) -> None:
        """``_solve_some`` with at most two of all levels and sets, at least one of them a set. At level none are only
        last blocks."""
        pairs = self.pairs
        if len(pairs.less) and self.costly:
            some = some.only(tables.rematerialised(some.place))
        if not len(pairs.less) or not len(some.place):
            return
        place, number, lives, waiting, budgets, most = some
        begin, end = self.begins[number], self.ends[number]
        fixed = self._fixed(begin, end, waiting) + self.workspace[number]
        # By pair (rows) and range (columns).
        room = np.minimum(budgets - fixed - pairs.recomputed[:, number], most - self._delayed(begin, end, waiting))
        room += 1e-9 * np.abs(room) + 1e-6
        with np.errstate(divide="ignore"):
            target = room / lives - (pairs.saved[:, end] - pairs.saved[:, begin]) - pairs.spared[:, begin]
        found = [np.searchsorted(own, -least) for own, least in zip(pairs.spared, target, strict=True)]
        k = np.maximum(np.array(found), begin)
        fits, k = k <= end, np.minimum(k, end)
        extra = np.take_along_axis(pairs.extra, k, axis=1) - pairs.extra[:, begin]
        seconds = np.where(fits, pairs.time[:, end] - pairs.time[:, begin] + extra, np.inf)
        pair, column = seconds.argmin(axis=0), np.arange(len(place))
        better = seconds[pair, column] < tables.best[place]
        at, pair, column = place[better], pair[better], column[better]
        tables.best[at], tables.full[at], tables.partly[at] = (
            seconds[pair, column],
            0,
            (k[pair, column] - begin[better]),
        )
        tables.middle[at], tables.rest[at] = pairs.less[pair], pairs.more[pair]

    @cached_property
    def pairs(self) -> _Pairs:
        """Those of which one keeps no more than the other and takes no less time, in every block."""
        every = range(len(self.saved))
        found = [
            (less, more)
            for less, more in product(every[1:], every)
            if max(less, more) >= len(LEVELS)
            and self.allowed[less]
            and self.allowed[more]
            and np.all(np.diff(self.saved[more] - self.saved[less]) >= 0)
            and np.all(np.diff(self.time[less] - self.time[more]) >= 0)
        ]
        less, more = np.array(found, dtype=np.int64).reshape(-1, 2).T
        time, saved, recomputed = np.array(self.time), np.array(self.saved), np.array(self.recomputed)
        return _Pairs(
            less=less,
            more=more,
            time=time[more],
            saved=saved[more],
            extra=time[less] - time[more],
            spared=saved[more] - saved[less],
            recomputed=np.maximum(recomputed[less], recomputed[more]),
        )

    def _fixed(self, begin: Ints, end: Ints, waiting: Ints) -> Floats:
        """Bytes at any level."""
        return np.asarray(self.static[end] - self.static[begin] + self._delayed(begin, end, waiting))

    def _delayed(self, begin: Ints, end: Ints, waiting: Ints) -> Floats:
        """Bytes of microbatches whose gradients of weights wait."""
        return np.asarray(waiting * (self.delayed[end] - self.delayed[begin]))


# Plans of a leaf differ in schedule and memory, not in blocks.
ranges_of = lru_cache(maxsize=64)(Ranges)


def _runs(blocks: Sequence[BlockCost]) -> tuple[int, ...]:
    """For every block the first of the run of equal blocks that it is in."""
    begins = [0]
    for b in range(1, len(blocks)):
        alike = blocks[b] is blocks[b - 1] or blocks[b] == blocks[b - 1]
        begins.append(begins[-1] if alike else b)
    return tuple(begins)


@lru_cache(maxsize=64)
def _distinct(runs: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """The ranges that differ, by begin and end: inside a run of equal blocks only the length of a range matters.

    Third, for all [a, b): the number of the one that [a, b) is like; the last number of all where there is no range.
    """
    n = len(runs)
    begin, end = np.triu_indices(n + 1, 1)
    first, last = np.array([*runs, n])[begin], np.array([0, *runs])[end]
    inside = first == last  # the last block is in the run of the first
    like = np.where(inside, first, begin), np.where(inside, first + end - begin, end)
    distinct, number = np.unique(like[0] * (n + 1) + like[1], return_inverse=True)
    known = np.full((n + 1, n + 1), len(distinct), dtype=np.int64)
    known[begin, end] = number
    return distinct // (n + 1), distinct % (n + 1), known


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
