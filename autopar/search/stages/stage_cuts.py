"""Stage cuts by exact dynamic programming.

Blocks 0..n-1 in order are cut into P stages. A stage takes some first blocks fully rematerialised, the next ones
partly, at one of two levels, and keeps the activations of the rest. Per microbatch, block b at level l takes T_l[b]
seconds and leaves A_l[b] bytes alive until its backward; a cut before block b costs S[b] seconds each step on the
critical path. Stage i keeps K_i microbatches alive and must fit

    sum static[b]  +  K_i sum A_level(b)[b]  +  max workspace[b]  +  R   <=   B_i

where R, present only if the stage rematerialises, is what one block holds while it is recomputed: the largest
A_none - A_level over the blocks of the stage, for the strongest level used; B_i is the rank's memory, or a share of it
if the rank has several stages (``stage_budgets``). The objective is a closed form of the schedule
(``pipeline_simulator.time_weights``), with alpha = 1 and beta = M - 1 for 1F1B and GPipe:

    alpha sum_i t_i  +  beta max_i t_i  +  sum of S over the cuts

A stage wants nothing but little time, so every range of blocks has one best use of levels for each K
(``rematerialisation_ranges``). With no stage as long as T, over the number of stages and the blocks they cover,

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
from itertools import pairwise

import numpy as np

from autopar.cost_model.schedule.pipeline_simulator import pipeline_time, time_weights
from autopar.ir.rematerialisation import LEVELS
from autopar.ir.schedule import Pipelining
from autopar.search.assign.instance import Floats
from autopar.search.stages.rematerialisation_ranges import Fitting, Limit, Ranges, ranges_of
from autopar.search.stages.stage import BlockCost, Stage, stage_time

# The first bound on the longest stage, of one as long as the mean or the longest block. Chosen: without a plan below it
# there is no bound, so it changes no result. 1.25 or 2: same plans, same work (docs/decisions/0021).
_FIRST_BOUND = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The best stages and their objective in seconds."""

    stages: tuple[Stage, ...]
    time_s: float


def cuts_time(blocks: Sequence[BlockCost], stages: Sequence[Stage], weights: tuple[float, float]) -> float:
    """The objective. weights: alpha and beta."""
    times = [stage_time(blocks, stage) for stage in stages]
    sends = sum(blocks[stage.first].send_s for stage in stages[1:])
    return weights[0] * sum(times) + weights[1] * max(times) + sends


def step_estimate(
    blocks: Sequence[BlockCost], stages: Sequence[Stage], shape: Pipelining, links: Sequence[float]
) -> float:
    """Seconds of a step in closed form.

    links: after each stage but the last, how many times as long a send takes as on the slowest link; 0 inside a rank.
    What comes once a step is beside that of other ranks, but for what their first forwards wait for one after another.
    """
    inside = [range(stage.first, stage.last + 1) for stage in stages]
    first = [sum(blocks[b].first_s for b in own) for own in inside]
    once = [sum(blocks[b].once_s for b in own) for own in inside]
    times = [stage_time(blocks, stage) - each for stage, each in zip(stages, once, strict=True)]
    sends = [link * blocks[stage.first].send_s for link, stage in zip(links, stages[1:], strict=True)]
    last = [sum(once[n] - first[n] for n in shape.stages_of(rank)) for rank in range(shape.num_ranks)]
    return pipeline_time(shape, times, sends) + shape.num_microbatches * (sum(first) + max(last))


def cut_pipeline(
    blocks: Sequence[BlockCost],
    shape: Pipelining,
    budget_bytes: float,
    levels: Sequence[str] = LEVELS,
    links: Sequence[float] | None = None,
    saved_bytes: float = np.inf,
) -> Cuts | None:
    """The best cuts for a pipeline whose ranks have ``budget_bytes``; None if nothing fits. ``time_s``: of a step.

    links: see ``step_estimate``; all the slowest if left out. saved_bytes: of the budget, for activations. A rank with
    several stages has its memory shared out to them in two ways, as blocks are too coarse for one of them to suit all
    numbers of stages; the better cuts are taken.
    """
    links = [1.0] * (shape.num_stages - 1) if links is None else links
    saved = saved_bytes / shape.virtual_stages
    found = [
        Cuts(stages=own.stages, time_s=step_estimate(blocks, own.stages, shape, links))
        for budgets in dict.fromkeys(stage_budgets(blocks, shape, budget_bytes))
        if (own := cut(blocks, shape.live(), time_weights(shape), budgets, levels, shape.waiting(), saved)) is not None
    ]
    return min(found, key=lambda own: own.time_s, default=None)


def stage_budgets(
    blocks: Sequence[BlockCost], shape: Pipelining, budget_bytes: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes for every stage, where a rank has ``budget_bytes``: in equal shares, and by what the stages need.

    One stage of a rank works at a time, so what is shared is the rest beside the workspace of one. What a stage needs
    is its state, and for as many microbatches as it has in flight the same part of its activations as every other, if
    stages are equal in seconds.
    """
    if shape.virtual_stages == 1 or np.isinf(budget_bytes):
        return ((budget_bytes,) * shape.num_stages,) * 2
    static, activations, workspace = _even_needs(tuple(blocks), shape)
    needed = workspace + static
    for rank in range(shape.num_ranks):
        own = list(shape.stages_of(rank))
        if activations[own].sum():
            left = budget_bytes - workspace - static[own].sum()
            needed[own] += activations[own] * left / activations[own].sum()
    equal = workspace + max(0.0, budget_bytes - workspace) / shape.virtual_stages
    return (equal,) * shape.num_stages, tuple(needed.tolist())


@lru_cache(maxsize=256)
def _even_needs(blocks: tuple[BlockCost, ...], shape: Pipelining) -> tuple[Floats, Floats, float]:
    """Of stages that are equal in seconds, bytes of state and of the activations of all that they have in flight; the
    largest workspace of a block."""
    seconds = np.cumsum([0.0, *(min(block.time_s) for block in blocks)])
    places = np.linspace(0.0, seconds[-1], shape.num_stages + 1)
    static, saved, delayed = (
        np.diff(np.interp(places, seconds, np.cumsum([0.0, *values])))
        for values in zip(*((b.static_bytes, b.saved_bytes[0], b.delayed_bytes) for b in blocks), strict=True)
    )
    waiting = np.array(shape.waiting())
    activations = saved * (shape.live() - waiting) + delayed * waiting
    return static, activations, max(block.workspace_bytes for block in blocks)


def cut(
    blocks: Sequence[BlockCost],
    live: Sequence[int],
    weights: tuple[float, float],
    budgets: Sequence[float],
    levels: Sequence[str] = LEVELS,
    waiting: Sequence[int] | None = None,
    saved: float = np.inf,
) -> Cuts | None:
    """The best cuts into ``len(live)`` stages; None if nothing fits.

    live, budgets: microbatches in flight in each stage, and bytes that it may take. weights: alpha and beta of the
    objective. levels: rematerialisation levels that may be used. waiting: those of ``live`` of which only the gradients
    of weights are left; none if not given. saved: most bytes of the activations of a stage.
    """
    waiting = [0] * len(live) if waiting is None else waiting
    limits = (Limit(n - w, w, budget, saved) for n, w, budget in zip(live, waiting, budgets, strict=True))
    if len(live) > len(blocks):
        return None
    return _cut(ranges_of(tuple(blocks), tuple(levels)), tuple(limits), weights)


@lru_cache(maxsize=1024)
def _cut(ranges: Ranges, limits: tuple[Limit, ...], weights: tuple[float, float]) -> Cuts | None:
    fitting = ranges.fitting(limits)
    if not fitting.cover():
        return None
    sends = np.array([0.0, *(block.send_s for block in ranges.blocks[1:]), np.inf])
    fastest = float(ranges.fastest[-1])

    def objective(answer: _Answer) -> float:
        return answer.total + weights[1] * answer.longest

    bound = _FIRST_BOUND * max(fastest / len(limits), float(np.diff(ranges.fastest).max()))
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
    for limit, (begin, end) in zip(limits, pairwise(best.bounds), strict=True):
        stages.append(search.solved.stage(begin, end, limit))
    return Cuts(stages=tuple(stages), time_s=objective(best))


@dataclass(frozen=True, slots=True)
class _Answer:
    """total: the sum. longest: the longest stage. bounds: the first block of each stage, and the number of blocks."""

    total: float
    longest: float
    bounds: list[int]


class _Search:
    """Cuts all of whose stages are shorter than ``bound`` seconds."""

    def __init__(self, fitting: Fitting, weight: float, sends: Floats, bound: float) -> None:
        self.ranges, self.weight, self.sends, self.bound = fitting.ranges, weight, sends, bound
        self.solved = fitting.ranges.solve(fitting, bound)
        self.times = [self.solved.of(limit) for limit in fitting.limits]
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
