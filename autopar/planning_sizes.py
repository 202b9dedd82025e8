"""Plans for several batches and lengths from one capture, and which plan is best over a mixture of lengths.

captured once, with symbols  ->  the least and the most work, searched in full  ->  the sizes between, from their plans
every plan at every length   ->  the one with the least seconds over the steps of a mixture

Where there are cores for it, lengths are shared out to forks of this process after the capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf, lcm
from typing import Any

from torch import nn

from autopar.cost_model.hardware.cluster import Cluster
from autopar.helper import spare_cores
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.search.outer.known_configurations import Known
from autopar.search.problem.constraints import Constraints
from autopar.sized_captures import InputsOf, Size, SizedCaptures
from autopar.sized_searches import SizedPlan, SizedSearches
from autopar.sized_workers import Worker

# Whoever searches, with its lengths.
Workers = Sequence[tuple[Worker, Sequence[int | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """The plan of one batch that takes the fewest seconds over a mixture of lengths.

    length: that it was searched for. step_time_s: of a step, the mean over the mixture; at: of each length.
    """

    batch: int
    length: int | None
    plan: Plan
    step_time_s: float
    at: Mapping[int | None, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlans:
    """found: by batch, then length. mixed: one for each batch for which a plan fits all lengths. num_captures: how
    often the model was traced. capture_time_s: for that, of all processes. search_time_s: by the clock, what was not
    the first capture. fixed: names of sizes at each of which it was traced -> why, with the line of the model that
    makes a number of it."""

    found: tuple[SizedPlan, ...]
    mixed: tuple[MixedPlan, ...]
    capture_time_s: float
    search_time_s: float
    num_captures: int
    fixed: Mapping[str, str] = field(default_factory=dict)


def find_plans(
    model: nn.Module,
    cluster: Cluster,
    inputs_of: InputsOf,
    batches: Sequence[int | None],
    lengths: Sequence[int | None],
    *,
    shares: Sequence[float] | None = None,
    constraints: Constraints | None = None,
    pin_degrees: bool = False,
    name: str | None = None,
    progress: Callable[..., None] = lambda doing, share=None: None,
) -> SizedPlans:
    """The best plan under ``constraints`` for every batch and length.

    model: on any device, meta included. shares: shares of the steps that have each of ``lengths``; equal ones if it is
    not given. pin_degrees: as ``planning.find_plan`` has it. Raises CaptureError.
    """
    constraints = constraints or Constraints()
    if len(constraints.recipes) > 1:
        raise InvalidInput(
            f"precision: a choice of {', '.join(own or constraints.precision for own in constraints.recipes)} is for "
            "one batch and length, and there are several.\n  try: one of them"
        )
    progress("capturing the model")
    whole, least, most = _common(batches), (batches[0], lengths[0]), (batches[-1], lengths[-1])
    size = (whole, lengths[-1])
    captures = SizedCaptures(model, inputs_of, size, other=least if least != size else None, name=name)
    start = time.perf_counter()
    searches = SizedSearches(
        captures=captures,
        whole=whole,
        cluster=cluster,
        constraints=constraints,
        pin_degrees=pin_degrees,
        progress=progress,
    )
    before = searches.captured()
    with ExitStack() as stack:
        workers = _workers(searches, lengths, stack)
        found, known = _ends(workers, batches, least, most)
        rest = [
            [(batch, length) for length in own for batch in batches if (batch, length) not in found]
            for _, own in workers
        ]
        # From the size that was searched in full outwards.
        rest = [sizes if number < len(rest) / 2 else sizes[::-1] for number, sizes in enumerate(rest)]
        for (worker, _), sizes in zip(workers, rest, strict=True):
            worker.ask("nearby", sizes, known)
        for sizes, (plans,) in zip(rest, _answers(workers), strict=True):
            found.update(zip(sizes, plans, strict=True))
        by_batch = [{length: found[batch, length] for length in lengths} for batch in batches]
        mixed = tuple(_mixed_plans(workers, by_batch, shares or [1.0] * len(lengths)))
        seconds, count = _captured(workers, searches, before)
    return SizedPlans(
        found=tuple(one for own in by_batch for one in own.values()),
        mixed=mixed,
        capture_time_s=seconds,
        search_time_s=time.perf_counter() - start,
        num_captures=count,
        fixed=captures.fixed,
    )


def _common(batches: Sequence[int | None]) -> int | None:
    """The least batch that all of ``batches`` divide: a step of each is a part of it."""
    given = [batch for batch in batches if batch is not None]
    return lcm(*given) if given else None


def _workers(searches: SizedSearches, lengths: Sequence[int | None], stack: ExitStack) -> Workers:
    """Whoever searches, with its lengths: neighbours, in order, the last of them in this process."""
    workers = []
    for first, end in pairwise(_even_bounds(lengths, min(len(lengths), 1 + spare_cores()))):
        worker = Worker(searches, fork=end < len(lengths))
        stack.callback(worker.stop)
        workers.append((worker, lengths[first:end]))
    return workers


def _even_bounds(lengths: Sequence[int | None], number: int) -> list[int]:
    """Where to divide ``lengths`` among so many workers, for times as even as they get.

    The time of a search grows about as the cube root of the length: on a long one more plans differ. (Llama-3-8B on
    64 GPUs, four batches: 0.6 s at 1,024 tokens, 1.1 s at 4,096, 1.9 s at 16,384, 2.2 s at 32,768.)
    """
    done = [0.0, *accumulate((length or 1) ** (1 / 3) for length in lengths)]
    bounds = [0]
    for part in range(1, number):
        free = range(bounds[-1] + 1, len(lengths) - number + part + 1)
        bounds.append(min(free, key=lambda end: abs(done[end] - done[-1] * part / number)))
    return [*bounds, len(lengths)]


def _answers(workers: Workers) -> list[list[Any]]:
    """Of each worker, to all that it was asked."""
    # This process first: the forks are at work meanwhile.
    return [worker.answers() for worker, _ in reversed(workers)][::-1]


def _ends(
    workers: Workers, batches: Sequence[int | None], least: Size, most: Size
) -> tuple[dict[Size, SizedPlan], tuple[Known, ...]]:
    """The plans with the least and the most work, searched in full, and what other searches may begin with."""
    ends = {least: workers[0][0], most: workers[-1][0]}
    for size, worker in ends.items():
        worker.ask("in_full", size)
    for worker, lengths in workers:
        worker.ask("prepare", batches, lengths)
    answers = [own for one in _answers(workers) for own in one if own is not None]
    known = tuple(known for _, best in answers for known in best)
    return dict(zip(ends, (plan for plan, _ in answers), strict=True)), known


def _captured(workers: Workers, searches: SizedSearches, before: tuple[float, int]) -> tuple[float, int]:
    """Seconds of captures and their number, of this process and its forks. before: what there was before these."""
    forks = [(worker, own) for worker, own in workers if worker.is_fork]
    for worker, _ in forks:
        worker.ask("captured")
    seconds, count = searches.captured()
    for ((own_s, own_count),) in _answers(forks):
        seconds, count = seconds + own_s - before[0], count + own_count - before[1]
    return seconds, count


def _mixed_plans(
    workers: Workers, by_batch: Sequence[Mapping[int | None, SizedPlan]], shares: Sequence[float]
) -> Iterator[MixedPlan]:
    """Of the plans for each batch that with the least seconds over all lengths, if one fits them all."""
    for searched in by_batch:
        plans = _different(searched)
        if len(searched) == 1 or any(own.plan is None for own in searched.values()):
            continue
        best: MixedPlan | None = None
        for (length, plan), at in zip(plans.items(), _times_s(workers, list(plans.values())), strict=True):
            mean = sum(share * seconds for share, seconds in zip(shares, at.values(), strict=True)) / sum(shares)
            if mean < (inf if best is None else best.step_time_s):
                batch = searched[length].batch
                best = MixedPlan(batch=batch, length=length, plan=plan, step_time_s=mean, at=at)
        if best is not None:
            yield best


def _times_s(workers: Workers, plans: Sequence[Plan]) -> Iterator[dict[int | None, float]]:
    """Seconds of a step of each plan at each length; infinite at all of them where it does not fit the longest."""
    lengths = [length for _, own in workers for length in own]
    last, _ = workers[-1]
    last.ask("times_s", plans, lengths[-1:])
    (longest,) = last.answers()
    # Most plans of short steps do not fit a long one, and need no time at the others.
    fitting = [plan for plan, (seconds,) in zip(plans, longest, strict=True) if seconds < inf]
    for worker, own in workers:
        worker.ask("times_s", fitting, own)
    by_worker = [times for (times,) in _answers(workers)]
    found = iter([[seconds for times in of_plan for seconds in times] for of_plan in zip(*by_worker, strict=True)])
    for (seconds,) in longest:
        yield dict(zip(lengths, next(found) if seconds < inf else [inf] * len(lengths), strict=True))


def _different(searched: Mapping[int | None, SizedPlan]) -> dict[int | None, Plan]:
    """The plans that differ in more than their predictions, by the first length that has each."""
    found: dict[str, tuple[int | None, Plan]] = {}
    for length, own in searched.items():
        if own.plan is not None:
            found.setdefault(own.plan.model_copy(update={"prediction": None}).model_dump_json(), (length, own.plan))
    return dict(found.values())
