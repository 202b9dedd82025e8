"""Stage cuts by exact dynamic programming.

Blocks 0..n-1 in order are cut into P stages. A stage takes some first blocks fully rematerialised, the next ones
partly, at one of two levels, and keeps the activations of the rest. Per microbatch, block b at level l takes T_l[b]
seconds and leaves A_l[b] bytes alive until its backward; a cut before block b costs S[b] seconds each step on the
critical path. Stage i keeps K_i microbatches alive and must fit

    sum static[b]  +  K_i sum A_level(b)[b]  +  max workspace[b]  +  R   <=   budget

where R, present only if the stage rematerialises, is what one block holds while it is recomputed: the largest
A_none - A_level over the blocks of the stage, for the strongest level used. The objective is the closed form of
the schedule (``simulator.pipeline_time``), with alpha = 1 and beta = M - 1 for 1F1B and GPipe:

    alpha sum_i t_i  +  beta max_i t_i  +  sum of S over the cuts

A stage wants nothing but little time, so every range of blocks has one best use of levels for each K
(``_Ranges``, all ranges at once). With no stage as long as T, over the number of stages and the blocks they cover,

    F_0(0) = 0,    F_{i+1}(b) = min { F_i(a) + S[a] + alpha t_i(a, b) : a < b, t_i(a, b) < T }

gives the least sum. T starts at a bound and is lowered to the longest stage of each answer, until no sum can make up
for the least longest stage that there is; so the best of the answers is the best of all cuts with stages shorter than
the bound. If longer ones might do better, the bound is raised to what they could have at most. O(P n w) for each T,
with w blocks in the longest stage that T allows; two or three of them do unless rematerialisation makes sum and maximum
disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from autopar.search.instance import Floats, Ints

# (range, block) pairs that are looked at together.
_CHUNK = 1 << 20

# The first bound on the longest stage, of one as long as the mean or the longest block.
_FIRST_BOUND = 1.5

# From the one that keeps most; ``autopar.cost_model.activations`` says what each keeps.
LEVELS = ("none", "selective", "alternate", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block in one plan.

    time_s, saved_bytes: per microbatch, at each of LEVELS. static_bytes: parameters, gradients, optimiser.
    workspace_bytes: held only while the block runs. send_s: of a cut before this block.
    """

    time_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    static_bytes: float
    workspace_bytes: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks ``first`` to ``last``: the first ``full`` at level full, ``alternate`` at level alternate, and so on.

    offload: what ZeRO shards of them is in host memory.
    """

    first: int
    last: int
    full: int = 0
    alternate: int = 0
    selective: int = 0
    offload: bool = False

    @property
    def num_blocks(self) -> int:
        return self.last - self.first + 1

    def level(self, block: int) -> int:
        """Index into LEVELS for block ``block``."""
        offset = block - self.first
        for level, count in ((3, self.full), (2, self.alternate), (1, self.selective)):
            if offset < count:
                return level
            offset -= count
        return 0

    @property
    def strongest(self) -> int:
        """Index into LEVELS of the strongest level of a block."""
        return self.level(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The best stages and their objective in seconds."""

    stages: tuple[Stage, ...]
    time_s: float


def stage_time(blocks: Sequence[BlockCost], stage: Stage) -> float:
    """Seconds of one microbatch, forward and backward."""
    return sum(blocks[b].time_s[stage.level(b)] for b in range(stage.first, stage.last + 1))


def stage_memory(blocks: Sequence[BlockCost], stage: Stage, live: int) -> float:
    """Bytes a rank of the stage needs with ``live`` microbatches in flight."""
    inside = range(stage.first, stage.last + 1)
    return (
        sum(blocks[b].static_bytes for b in inside)
        + live * sum(blocks[b].saved_bytes[stage.level(b)] for b in inside)
        + max(blocks[b].workspace_bytes for b in inside)
        + max(blocks[b].saved_bytes[0] - blocks[b].saved_bytes[stage.strongest] for b in inside)
    )


def cuts_time(blocks: Sequence[BlockCost], stages: Sequence[Stage], weights: tuple[float, float]) -> float:
    """The objective. weights: alpha and beta."""
    times = [stage_time(blocks, stage) for stage in stages]
    sends = sum(blocks[stage.first].send_s for stage in stages[1:])
    return weights[0] * sum(times) + weights[1] * max(times) + sends


def cut(
    blocks: Sequence[BlockCost],
    live: Sequence[int],
    weights: tuple[float, float],
    budget_bytes: float,
    levels: Sequence[str] = LEVELS,
) -> Cuts | None:
    """The best cuts into ``len(live)`` stages; None if nothing fits.

    live: microbatches in flight in each stage. weights: alpha and beta of the objective. levels: rematerialisation
    levels that may be used.
    """
    return _cut(tuple(blocks), tuple(live), weights, budget_bytes, tuple(levels))


@lru_cache(maxsize=256)
def _cut(
    blocks: tuple[BlockCost, ...],
    live: tuple[int, ...],
    weights: tuple[float, float],
    budget: float,
    levels: tuple[str, ...],
) -> Cuts | None:
    if len(live) > len(blocks):
        return None
    ranges = _ranges(blocks, levels)
    fitting = ranges.fitting(live, budget)
    if not fitting.cover():
        return None
    sends = np.array([0.0, *(block.send_s for block in blocks[1:]), np.inf])
    fastest = float(ranges.fastest[-1])

    def objective(answer: _Answer) -> float:
        return answer.total + weights[1] * answer.longest

    bound = _FIRST_BOUND * max(fastest / len(live), float(np.diff(ranges.fastest).max()))
    while True:
        search = _Search(fitting, weights[0], sends, bound)
        least = search.least_longest()
        best = search.least_sum(float(np.nextafter(least, np.inf))) if np.isfinite(least) else None
        if best is None:
            if np.isinf(bound):
                return None
            bound = np.inf
            continue
        # Often the shortest longest stage costs nothing, and that is all.
        other = search.least_sum(bound)
        while other is not None and other.total + weights[1] * least < objective(best):
            best = min(best, other, key=objective)
            other = search.least_sum(other.longest)
        # The sum takes ``fastest`` at least, so the longest stage of anything better is shorter than this.
        over = objective(best) - weights[0] * fastest
        if np.isinf(bound) or over <= weights[1] * bound:
            break
        bound = over / weights[1] * (1 + 1e-9) if weights[1] else np.inf
    stages = []
    for count, (begin, end) in zip(live, pairwise(best.bounds), strict=True):
        stages.append(search.solved.stage(begin, end, count))
    return Cuts(stages=tuple(stages), time_s=objective(best))


@dataclass(frozen=True, slots=True)
class _Answer:
    """total: the sum. longest: the longest stage. bounds: the first block of each stage, and the number of blocks."""

    total: float
    longest: float
    bounds: list[int]


class _Search:
    """Cuts all of whose stages are shorter than ``bound`` seconds."""

    def __init__(self, fitting: _Fitting, weight: float, sends: Floats, bound: float) -> None:
        self.ranges, self.weight, self.sends, self.bound = fitting.ranges, weight, sends, bound
        self.solved = fitting.ranges.solve(fitting, bound)
        self.times = [self.solved.of(count) for count in fitting.live]
        self.possible = np.isfinite(sends)

    def _windows(self, limit: float) -> list[slice] | None:
        """Where the stages can begin, and end, if each is shorter than ``limit``; None if they cannot."""
        reach, count = self.ranges.reach(limit), len(self.times)
        high = [0]
        for _ in range(count):
            high.append(int(reach[high[-1]]))
        if high[-1] < self.ranges.n:
            return None
        low = [self.ranges.n]
        for number in reversed(range(count)):
            low.append(max(number, int(np.searchsorted(reach, low[-1]))))
        return [slice(begin, end + 1) for begin, end in zip(reversed(low), high, strict=True)]

    def least_longest(self) -> float:
        """The shortest that the longest stage can be; inf if there are no cuts."""
        windows = self._windows(self.bound)
        if windows is None:
            return float("inf")
        front = np.zeros(1)
        for times, (begin, end) in zip(self.times, pairwise(windows), strict=True):
            stage = np.where(self.possible[begin, None], times[self.ranges.known[begin, end]], np.inf)
            front = np.maximum(front[:, None], stage).min(axis=0)
        return float(front[-1])

    def least_sum(self, limit: float) -> _Answer | None:
        """The least sum with every stage shorter than ``limit``."""
        windows = self._windows(limit)
        if windows is None:
            return None
        front, back = np.zeros(1), []
        for times, (begin, end) in zip(self.times, pairwise(windows), strict=True):
            stage = times[self.ranges.known[begin, end]]
            costs = np.where(stage < limit, self.weight * stage, np.inf) + self.sends[begin, None]
            grown = front[:, None] + costs
            back.append(grown.argmin(axis=0))
            front = grown.min(axis=0)
        if not np.isfinite(front[-1]):
            return None
        bounds = [self.ranges.n]
        for begins, begin, end in zip(reversed(back), reversed(windows[:-1]), reversed(windows[1:]), strict=True):
            bounds.append(begin.start + int(begins[bounds[-1] - end.start]))
        bounds.reverse()
        known = [self.ranges.known[a, b] for a, b in pairwise(bounds)]
        longest = max(float(times[number]) for times, number in zip(self.times, known, strict=True))
        return _Answer(float(front[-1]), longest, bounds)


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Which ranges (columns) may fit into ``budget`` with how many microbatches alive (rows), whatever that takes.

    live: of each stage. rows: of each number of them.
    """

    ranges: _Ranges
    live: Sequence[int]
    budget: float
    rows: dict[int, int]
    fits: NDArray[np.bool_]

    def cover(self) -> bool:
        """Whether stages that may fit cover all blocks. Each takes as many as it can: what fits, fits in part."""
        end, known = 0, self.ranges.known
        for count in self.live:
            end += int(np.count_nonzero(self.fits[self.rows[count]][known[end, end + 1 :]]))
        return end >= self.ranges.n


@dataclass(frozen=True, slots=True)
class _Solved:
    """Of every number of live microbatches (rows) and every range (columns; the last is no range): the least seconds,
    inf where nothing fits or it is too long, and the levels for that."""

    ranges: _Ranges
    rows: dict[int, int]
    times: Floats
    full: Ints
    partly: Ints
    middle: Ints

    def of(self, live: int) -> Floats:
        """Seconds of the ranges, by number as in ``_Ranges.known``."""
        return np.asarray(self.times[self.rows[live]])

    def stage(self, begin: int, end: int, live: int) -> Stage:
        """The best use of levels for a range."""
        at = self.rows[live], self.ranges.known[begin, end]
        level, count = LEVELS[self.middle[at]], int(self.partly[at])
        return Stage(
            first=begin,
            last=end - 1,
            full=int(self.full[at]),
            alternate=count if level == "alternate" else 0,
            selective=count if level == "selective" else 0,
        )


class _Ranges:
    """Best levels for every range [a, b) of blocks.

    With m the end of the fully and k the end of the partly rematerialised blocks, a <= m <= k <= b, time and saved
    bytes are sums over prefixes: both separate into a term of m, one of k, and one of the range. The level of the
    blocks between m and k is tried both ways.
    """

    def __init__(self, blocks: tuple[BlockCost, ...], levels: tuple[str, ...]) -> None:
        self.n = len(blocks)
        self.fastest = _prefix([min(b.time_s) for b in blocks])
        self.blocks = blocks
        self.allowed = [level in levels for level in LEVELS]
        self.costly = all(block.time_s[0] <= min(block.time_s) for block in blocks)
        every = range(len(LEVELS))
        self.time = [_prefix([b.time_s[level] for b in blocks]) for level in every]
        self.saved = [_prefix([b.saved_bytes[level] for b in blocks]) for level in every]
        # The least that blocks keep if none is rematerialised more strongly than at a level.
        usable = [[other for other in range(level + 1) if self.allowed[other]] for level in every]
        self.least = [
            _prefix([min(b.saved_bytes[other] for other in own) for b in blocks]) if own else None for own in usable
        ]
        self.static = _prefix([b.static_bytes for b in blocks])
        self.begins, self.ends, self.known = _distinct(_runs(blocks))
        self.workspace = self._largest([b.workspace_bytes for b in blocks])
        self.recomputed = [self._largest([b.saved_bytes[0] - b.saved_bytes[level] for b in blocks]) for level in every]

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

    def fitting(self, live: Sequence[int], budget: float) -> _Fitting:
        """The ranges that may fit with as many microbatches alive as some stage has."""
        lives, begins, ends = tuple(dict.fromkeys(live)), self.begins, self.ends
        fixed = self.static[ends] - self.static[begins] + self.workspace
        fits = np.zeros((len(lives), len(begins) + 1), dtype=bool)
        for level, least in enumerate(self.least):
            if least is not None and self.allowed[level]:
                room = budget * (1 + 2e-9) + 2e-6 - fixed - self.recomputed[level]
                fits[:, :-1] |= np.array(lives)[:, None] * (least[ends] - least[begins]) <= room
        return _Fitting(self, live, budget, {count: row for row, count in enumerate(lives)}, fits)

    def solve(self, fitting: _Fitting, bound: float) -> _Solved:
        """The ranges that may fit and take less than ``bound`` seconds."""
        begins, ends, shape, budget = self.begins, self.ends, fitting.fits.shape, fitting.budget
        best = np.full(shape, np.inf)
        full, partly, middle = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        live = np.array(list(fitting.rows))[:, None]
        wanted = np.nonzero(fitting.fits[:, :-1] & (ends <= self.reach(bound)[begins]))
        longest = int((ends - begins)[wanted[1]].max(initial=0))
        tables = best.reshape(-1), full.reshape(-1), partly.reshape(-1), middle.reshape(-1)
        for row, number in zip(*(np.array_split(w, 1 + len(w) * longest // _CHUNK) for w in wanted), strict=True):
            self._solve_some(row * shape[1] + number, number, live[row, 0], budget, *tables)
        return _Solved(self, fitting.rows, best, full, partly, middle)

    def _solve_some(
        self, some: Ints, number: Ints, lives: Ints, budget: float, best: Floats, full: Ints, partly: Ints, middle: Ints
    ) -> None:
        """Fill in the places ``some`` of the tables: of the ranges ``number`` with ``lives`` microbatches alive."""
        length = int((self.ends - self.begins)[number].max(initial=0))
        for use_full, level in product((False, True), range(3)):
            if (use_full and not self.allowed[3]) or (level and not self.allowed[level]):
                continue
            if not self.allowed[0] and not (use_full or level):
                continue
            if self.costly and (use_full or level):
                # What fits without rematerialisation is best without it.
                undecided = ~np.isfinite(best[some]) | (full[some] + partly[some] > 0)
                some, number, lives = some[undecided], number[undecided], lives[undecided]
            if not len(some):
                return
            # What changes when the blocks before k go from level none to the one tried.
            extra_time, extra_saved = self.time[level] - self.time[0], self.saved[level] - self.saved[0]
            monotonous = bool(np.all(np.diff(extra_saved) <= 0) and np.all(np.diff(extra_time) >= 0))
            begin, end, live = self.begins[number, None], self.ends[number, None], lives[:, None]
            fixed = self.static[end] - self.static[begin] + self.workspace[number, None]
            room = budget - fixed - self.recomputed[3 if use_full else level][number, None]
            slack = 1e-9 * np.abs(room) + 1e-6
            m = begin + (np.arange(1, length + 1) if use_full else np.zeros(1, dtype=np.int64))
            inside = m <= end
            m = np.minimum(m, end)
            candidates: list[Ints]
            if not self.allowed[0]:
                # Every block is rematerialised: the middle part reaches to the end, or there is none.
                if not level:
                    m, inside = end, np.ones((len(some), 1), dtype=bool)
                candidates = [np.broadcast_to(end, m.shape)]
            elif not level:
                candidates = [m]
            elif monotonous:
                # More blocks at that level take less memory and more time: the fewest that fit are best.
                target = (room + slack) / live - self._saved(begin, end, m, m, level) + extra_saved[m]
                k = np.searchsorted(-extra_saved, -target, side="left")
                candidates = [np.minimum(np.maximum(k, m + 1), self.n)]
            else:
                candidates = [np.minimum(m + more, self.n) for more in range(1, length + 1)]
            for k in candidates:
                fits = (k <= end) & (live * self._saved(begin, end, m, k, level) <= room + slack)
                fits &= inside
                fits &= (k > m) if level else (k == m)
                seconds = np.where(fits, self._seconds(begin, end, m, k, level), np.inf)
                column = seconds.argmin(axis=1)
                rows = np.arange(len(some))
                better = seconds[rows, column] < best[some]
                at = some[better]
                best[at] = seconds[rows, column][better]
                full[at] = m[rows, column][better] - begin[better, 0]
                partly[at] = (k - m)[rows, column][better]
                middle[at] = level

    def _seconds(self, begin: Ints, end: Ints, m: Ints, k: Ints, level: int) -> Floats:
        none, some, everything = self.time[0], self.time[level], self.time[3]
        return np.asarray(everything[m] - everything[begin] + some[k] - some[m] + none[end] - none[k])

    def _saved(self, begin: Ints, end: Ints, m: Ints, k: Ints, level: int) -> Floats:
        """Bytes of one microbatch."""
        none, some, everything = self.saved[0], self.saved[level], self.saved[3]
        return np.asarray(everything[m] - everything[begin] + some[k] - some[m] + none[end] - none[k])


# Plans of a leaf differ in schedule and memory, not in blocks.
_ranges = lru_cache(maxsize=16)(_Ranges)


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
