"""Plans for several batches and lengths from one capture, and which plan is best over a mixture of lengths.

captured once, with symbols  ->  the least and the most work, searched in full  ->  the sizes between, from their plans
every plan at every length   ->  the one with the least seconds over the steps of a mixture

Where there are cores for it, forks of this process take part. What a size is searched from does not depend on who does
it, so the plans are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf, lcm

from torch import nn

from autopar.cost_model.hardware.cluster import Cluster
from autopar.garbage import collector_paused
from autopar.helper import spare_cores
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.search.problem.constraints import Constraints
from autopar.sized_captures import InputsOf, Size, SizedCaptures
from autopar.sized_searches import SizedPlan, SizedSearches
from autopar.sized_workers import Workers


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
    searches_of = partial(SizedSearches, cluster=cluster, constraints=constraints, pin_degrees=pin_degrees)
    num_forks = min(spare_cores(), len(lengths) - 1)
    with ExitStack() as stack:
        stack.enter_context(collector_paused())
        captures = SizedCaptures(
            model,
            inputs_of,
            size,
            other=least if least != size else None,
            then=lambda own: searches_of(captures=own, whole=least[0], progress=lambda *_: None).in_full(least),
            name=name,
        )
        stack.callback(captures.stop)
        start = time.perf_counter()
        searches = searches_of(captures=captures, whole=whole, progress=progress)
        ends = {least: captures.done_by_fork() or searches.in_full(least)}
        ends[most] = ends[least] if most == least else searches.in_full(most)
        workers, before = Workers(searches, num_forks), searches.captured()
        stack.callback(workers.stop)
        found = workers.nearby(_order(batches, lengths), ends)
        by_batch = [{length: found[batch, length].plan for length in lengths} for batch in batches]
        mixed = tuple(_mixed_plans(workers, by_batch, shares or [1.0] * len(lengths)))
        captured = [searches.captured(), *((own_s - before[0], own - before[1]) for own_s, own in workers.captured())]
    return SizedPlans(
        found=tuple(one for own in by_batch for one in own.values()),
        mixed=mixed,
        capture_time_s=sum(own_s for own_s, _ in captured),
        search_time_s=time.perf_counter() - start,
        num_captures=sum(own for _, own in captured),
        fixed=captures.fixed,
    )


def _common(batches: Sequence[int | None]) -> int | None:
    """The least batch that all of ``batches`` divide: a step of each is a part of it."""
    given = [batch for batch in batches if batch is not None]
    return lcm(*given) if given else None


def _order(batches: Sequence[int | None], lengths: Sequence[int | None]) -> dict[Size, Sequence[Size]]:
    """Sizes in the order in which they are searched for, and those whose plans each begins with.

    Those of the longest and the shortest length begin with the least and the most work, those of the length in their
    middle with the same batch at these two, and so on between; there all but the first batch also with the one before.
    """
    least, most = (batches[0], lengths[0]), (batches[-1], lengths[-1])
    found: dict[Size, Sequence[Size]] = {}
    for length in (lengths[-1], lengths[0]):
        found.update({(batch, length): (least, most) for batch in batches if (batch, length) not in (least, most)})
    open_ = [(0, len(lengths) - 1)]
    for first, last in open_:
        middle = (first + last + 1) // 2
        if first < middle < last:
            open_ += [(middle, last), (first, middle)]
            before: list[Size] = []
            for batch in batches:
                size = batch, lengths[middle]
                found[size] = (*before, (batch, lengths[first]), (batch, lengths[last]))
                before = [size]
    return found


def _mixed_plans(
    workers: Workers, by_batch: Sequence[Mapping[int | None, SizedPlan]], shares: Sequence[float]
) -> Iterator[MixedPlan]:
    """Of the plans for each batch that with the least seconds over all lengths, if one fits them all."""
    tried = [
        _different(searched)
        for searched in by_batch
        if len(searched) > 1 and all(own.plan is not None for own in searched.values())
    ]
    every = [plan for plans in tried for plan in plans.values()]
    times = _times_s(workers, every, tuple(by_batch[0]))
    for plans in tried:
        best: MixedPlan | None = None
        for length, plan in plans.items():
            at = next(times)
            mean = sum(share * seconds for share, seconds in zip(shares, at.values(), strict=True)) / sum(shares)
            if mean < (inf if best is None else best.step_time_s):
                batch = plan.batch.global_size
                best = MixedPlan(batch=batch, length=length, plan=plan, step_time_s=mean, at=at)
        if best is not None:
            yield best


def _times_s(
    workers: Workers, plans: Sequence[Plan], lengths: Sequence[int | None]
) -> Iterator[dict[int | None, float]]:
    """Seconds of a step of each plan at each length; infinite at all of them where it does not fit the longest."""
    *others, last = lengths
    longest = workers.times_s(plans, (last,))[last]
    # Most plans of short steps do not fit a long one, and need no time at the others.
    found = workers.times_s([plan for plan, seconds in zip(plans, longest, strict=True) if seconds < inf], others)
    rows = zip(*(found[length] for length in others), strict=True)
    for seconds in longest:
        at = (*next(rows), seconds) if seconds < inf else (inf,) * len(lengths)
        yield dict(zip(lengths, at, strict=True))


def _different(searched: Mapping[int | None, SizedPlan]) -> dict[int | None, Plan]:
    """The plans that differ in more than their predictions, by the first length that has each."""
    found: dict[str, tuple[int | None, Plan]] = {}
    for length, own in searched.items():
        if own.plan is not None:
            found.setdefault(own.plan.model_copy(update={"prediction": None}).model_dump_json(), (length, own.plan))
    return dict(found.values())
