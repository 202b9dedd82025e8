"""Stage cuts by exact dynamic programming.

Blocks 0..n-1 in order are cut into P stages. A stage takes some first blocks fully rematerialised, the next
ones selectively, and keeps the activations of the rest. Per microbatch, block b at level l takes T_l[b] seconds
and leaves A_l[b] bytes alive until its backward; a cut before block b costs S[b] seconds each step on the
critical path. Stage i keeps K_i microbatches alive and must fit

    sum static[b]  +  K_i sum A_level(b)[b]  +  max workspace[b]  +  R   <=   budget

where R, present only if the stage rematerialises, is what one block holds while it is recomputed: the largest
A_none - A_level over the blocks of the stage, for the strongest level used. The objective is the closed form of
the schedule (``simulator.pipeline_time``), with alpha = 1 and beta = M - 1 for 1F1B and GPipe:

    alpha sum_i t_i  +  beta max_i t_i  +  sum of S over the cuts

A stage wants nothing but little time, so every range of blocks has one best use of levels for each K
(``_range_times``, all ranges at once). Then, over the number of stages and the blocks they cover,

    F_0(0) = {(0, 0)},   F_{i+1}(b) = Pareto of { (sum + S[a] + alpha t_i(a, b), max(max, t_i(a, b))) : a < b, F_i(a) }

which is exact because the objective grows with both the sum and the maximum. Time O(P n^2 |F|).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVELS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block in one plan.

    time_s, saved_bytes: per microbatch, at each of LEVELS. static_bytes: parameters, gradients, optimiser.
    workspace_bytes: held only while the block runs. send_s: of a cut before this block.
    """

    time_s: tuple[float, float, float]
    saved_bytes: tuple[float, float, float]
    static_bytes: float
    workspace_bytes: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks ``first`` to ``last``: the first ``full`` fully, the next ``selective`` selectively rematerialised.

    offload: what ZeRO shards of them is in host memory.
    """

    first: int
    last: int
    full: int = 0
    selective: int = 0
    offload: bool = False

    @property
    def num_blocks(self) -> int:
        return self.last - self.first + 1

    def level(self, block: int) -> int:
        """Index into LEVELS for block ``block``."""
        offset = block - self.first
        return 2 if offset < self.full else 1 if offset < self.full + self.selective else 0


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
    strongest = 2 if stage.full else 1 if stage.selective else 0
    return (
        sum(blocks[b].static_bytes for b in inside)
        + live * sum(blocks[b].saved_bytes[stage.level(b)] for b in inside)
        + max(blocks[b].workspace_bytes for b in inside)
        + max(blocks[b].saved_bytes[0] - blocks[b].saved_bytes[strongest] for b in inside)
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
    n, num_stages = len(blocks), len(live)
    if num_stages > n:
        return None
    ranges = _Ranges(blocks, levels)
    times = {count: ranges.times(count, budget) for count in sorted(set(live))}
    sends = np.array([0.0] + [block.send_s for block in blocks[1:]])
    # front[b]: rows (sum, max, previous b, row there), sorted by sum, of the stages so far covering blocks < b.
    fronts: list[dict[int, Floats]] = [{0: np.array([[0.0, 0.0, -1.0, -1.0]])}]
    for stage, count in enumerate(live):
        time = times[count]
        front: dict[int, Floats] = {}
        last_stage = stage == num_stages - 1
        for end in (n,) if last_stage else range(stage + 1, n - (num_stages - stage - 1) + 1):
            candidates = []
            for begin, rows in fronts[-1].items():
                if begin >= end or not np.isfinite(time[begin, end]):
                    continue
                grown = np.empty_like(rows)
                grown[:, 0] = rows[:, 0] + sends[begin] + weights[0] * time[begin, end]
                grown[:, 1] = np.maximum(rows[:, 1], time[begin, end])
                grown[:, 2] = begin
                grown[:, 3] = np.arange(len(rows))
                candidates.append(grown)
            if candidates:
                front[end] = _pareto(np.concatenate(candidates))
        fronts.append(front)
    final = fronts[-1].get(n)
    if final is None:
        return None
    objective = final[:, 0] + weights[1] * final[:, 1]
    row, end = int(objective.argmin()), n
    best = float(objective[row])
    stages = []
    for stage in range(num_stages - 1, -1, -1):
        begin = int(fronts[stage + 1][end][row, 2])
        row = int(fronts[stage + 1][end][row, 3])
        full, selective = ranges.levels(begin, end, live[stage], budget)
        stages.append(Stage(first=begin, last=end - 1, full=full, selective=selective))
        end = begin
    return Cuts(stages=tuple(reversed(stages)), time_s=best)


def _pareto(rows: Floats) -> Floats:
    """Rows of which no other has both a smaller sum and a smaller maximum."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(rows[:, 1])[:-1]])
    return rows[rows[:, 1] < best_before]


class _Ranges:
    """Best levels for every range [a, b) of blocks.

    With m the end of the fully and k the end of the selectively rematerialised blocks, a <= m <= k <= b, time
    and saved bytes are sums over prefixes: both separate into a term of m, one of k, and one of the range.
    """

    def __init__(self, blocks: tuple[BlockCost, ...], levels: tuple[str, ...]) -> None:
        self.n = len(blocks)
        self.blocks = blocks
        self.run_end = list(range(1, self.n + 1))
        for b in range(self.n - 2, -1, -1):
            if blocks[b] == blocks[b + 1]:
                self.run_end[b] = self.run_end[b + 1]
        self.allowed = [level in levels for level in LEVELS]
        self.costly = all(block.time_s[0] <= min(block.time_s) for block in blocks)
        self.time = [_prefix([b.time_s[level] for b in blocks]) for level in range(3)]
        self.saved = [_prefix([b.saved_bytes[level] for b in blocks]) for level in range(3)]
        self.least = _prefix([min(b.saved_bytes) for b in blocks])
        self.static = _prefix([b.static_bytes for b in blocks])
        self.workspace = _range_max([b.workspace_bytes for b in blocks])
        self.recomputed = [_range_max([b.saved_bytes[0] - b.saved_bytes[level] for b in blocks]) for level in range(3)]
        self._found: dict[tuple[int, float], tuple[Floats, NDArray[np.int64], NDArray[np.int64]]] = {}

    def times(self, live: int, budget: float) -> Floats:
        """[a, b]: least seconds of blocks a to b - 1 as one stage, inf where nothing fits."""
        return self._solve(live, budget)[0]

    def levels(self, begin: int, end: int, live: int, budget: float) -> tuple[int, int]:
        """Number of fully and of selectively rematerialised blocks in the best use of a range."""
        _, full, selective = self._solve(live, budget)
        return int(full[begin, end]), int(selective[begin, end])

    def _solve(self, live: int, budget: float) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
        if (live, budget) not in self._found:
            self._found[live, budget] = self._solve_all(live, budget)
        return self._found[live, budget]

    def _solve_all(self, live: int, budget: float) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
        n = self.n
        best = np.full((n + 1, n + 1), np.inf)
        full = np.zeros((n + 1, n + 1), dtype=np.int64)
        selective = np.zeros((n + 1, n + 1), dtype=np.int64)
        position = np.arange(n + 1)
        # Terms of k at (m, k): what changes when blocks m..k-1 go from level none to selective.
        extra_time = self.time[1] - self.time[0]
        extra_saved = live * (self.saved[1] - self.saved[0])
        for begin in range(n):
            ends = position[begin + 1 :]
            if begin and self.blocks[begin] == self.blocks[begin - 1]:
                # Inside a run of equal blocks only the length of a range matters.
                known = position[begin + 1 : self.run_end[begin] + 1]
                for table in (best, full, selective):
                    table[begin, known] = table[begin - 1, known - 1]
                ends = position[self.run_end[begin] + 1 :]
            least = budget - live * self.least[ends] + live * self.least[begin] - self.static[ends] + self.static[begin]
            ends = ends[least >= -1e-6]
            if not len(ends):
                continue
            for use_full, use_selective in ((False, False), (False, True), (True, False), (True, True)):
                if (use_full and not self.allowed[2]) or (use_selective and not self.allowed[1]):
                    continue
                if self.costly and (use_full or use_selective):
                    # What fits without rematerialisation is best without it.
                    ends = ends[~np.isfinite(best[begin, ends]) | (full[begin, ends] + selective[begin, ends] > 0)]
                    if not len(ends):
                        break
                fixed = self.static[ends] - self.static[begin] + self.workspace[begin, ends]
                strongest = 2 if use_full else 1 if use_selective else 0
                room = budget - fixed - self.recomputed[strongest][begin, ends]
                m = position[begin + 1 : n + 1] if use_full else position[begin : begin + 1]
                if not self.allowed[0]:
                    # Every block is rematerialised: the selective part reaches to the end, or there is none.
                    if not (use_full or use_selective):
                        continue
                    grid_m = np.broadcast_to(m[None, :] if use_selective else ends[:, None], (len(ends), len(m)))
                    grid_k = np.broadcast_to(ends[:, None], grid_m.shape)
                    self._take(
                        begin, ends, grid_m, grid_k, live, room, best, full, selective, use_selective=use_selective
                    )
                    continue
                if not use_selective:
                    grid_m = np.broadcast_to(m[None, :], (len(ends), len(m)))
                    self._take(
                        begin, ends, grid_m, grid_m, live, room, best, full, selective, use_selective=use_selective
                    )
                    continue
                if np.all(np.diff(extra_saved) <= 0) and np.all(np.diff(extra_time) >= 0):
                    # More selective blocks take less memory and more time: the fewest that fit are best.
                    base = self._saved(begin, ends[:, None], m[None, :], m[None, :], live)
                    target = room[:, None] - base + extra_saved[m][None, :]
                    k = np.searchsorted(-extra_saved, -target, side="left")
                    k = np.minimum(np.maximum(k, m[None, :] + 1), n)
                    self._take(
                        begin,
                        ends,
                        np.broadcast_to(m[None, :], k.shape),
                        k,
                        live,
                        room,
                        best,
                        full,
                        selective,
                        use_selective=use_selective,
                    )
                    continue
                for one_m in m[m < n]:
                    k = np.broadcast_to(position[one_m + 1 :][None, :], (len(ends), n - one_m))
                    self._take(
                        begin,
                        ends,
                        np.full(k.shape, one_m),
                        k,
                        live,
                        room,
                        best,
                        full,
                        selective,
                        use_selective=use_selective,
                    )
        return best, full, selective

    def _saved(self, begin: int, end: NDArrayInt, m: NDArrayInt, k: NDArrayInt, live: int) -> Floats:
        none, some, everything = self.saved
        return np.asarray(
            live * (everything[m] - everything[begin] + some[k] - some[m] + none[end] - none[k]), dtype=np.float64
        )

    def _take(
        self,
        begin: int,
        ends: NDArrayInt,
        m: NDArrayInt,
        k: NDArrayInt,
        live: int,
        room: Floats,
        best: Floats,
        full: NDArrayInt,
        selective: NDArrayInt,
        *,
        use_selective: bool,
    ) -> None:
        """Enter the best of the candidates (m, k)[end, number] where it beats what is there."""
        none, some, everything = self.time
        end = ends[:, None]
        seconds = everything[m] - everything[begin] + some[k] - some[m] + none[end] - none[k]
        slack = 1e-9 * np.abs(room[:, None]) + 1e-6
        fits = (k <= end) & (self._saved(begin, end, m, k, live) <= room[:, None] + slack)
        if use_selective:
            fits &= k > m
        seconds = np.where(fits, seconds, np.inf)
        number = seconds.argmin(axis=1)
        rows = np.arange(len(ends))
        found = seconds[rows, number]
        better = found < best[begin, ends]
        at = ends[better]
        best[begin, at] = found[better]
        full[begin, at] = m[rows, number][better] - begin
        selective[begin, at] = (k - m)[rows, number][better]


NDArrayInt = NDArray[np.int64]


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


def _range_max(values: Sequence[float]) -> Floats:
    """[a, b]: the largest of values[a:b]."""
    n = len(values)
    array = np.asarray(values, dtype=np.float64)
    largest = np.zeros((n + 1, n + 1))
    for begin in range(n):
        largest[begin, begin + 1 :] = np.maximum.accumulate(array[begin:])
    return largest
