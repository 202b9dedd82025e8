"""The critical path of a predicted step, with every task divided into ops and collectives.

The step is simulated with streams (``step_tasks``). The path is a row of tasks without a gap, so its items add up to
the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_model.schedule.critical_path import critical_path
from autopar.cost_model.schedule.stream_simulator import COMPUTE, Span
from autopar.ir.rule import Assignment
from autopar.ir.schedule import Pipelining
from autopar.search.predict.block_items import BlockItems, Item, Seconds
from autopar.search.predict.jitter import StragglerDelays
from autopar.search.predict.predict import predict
from autopar.search.predict.step_tasks import GATHER, REDUCE, SEND, BlockPass, StepTasks, communication_of, step_tasks
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.kept_sets import level_names
from autopar.search.stages.stage import Stage

_OPTIMISER = Item("optimizer", "step", "all parameters")
_SHARED = Item("collective", "all_reduce", "gradients of parameters that stages share", "pp")
_SLOWED = Item("slowdown", "compute", "beside communication")
_PRELUDE = Item("prelude", "step inputs", "every stage")
_JITTER = Item("jitter", "waiting", "for the slowest rank")
_HOST = Item("copy", "activations", "to host memory and back")
_ACTIVATIONS = Item("send", "activations", "to the next stage", "pp")
_GRADIENTS = Item("send", "gradients", "to the stage before", "pp")
_COPIES = Item("send", "copies", "by the core that computes", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """The critical path of a step.

    step_time_s: of the simulated step: the length of the path. spans: the path. items: of its tasks, with
    seconds, the longest first; they add up to the step. rank: of the pipeline, on which most of the path lies.
    pipeline_wait_s: how long the path is on other ranks, or between ranks, while that one has nothing to compute.
    """

    step_time_s: float
    spans: tuple[Span, ...]
    items: tuple[tuple[Item, float], ...]
    rank: int
    pipeline_wait_s: float


def step_path(
    pricing: Pricing, assignment: tuple[Assignment, ...], stages: Sequence[Stage], shape: Pipelining
) -> StepPath:
    """The critical path of a plan in the terms of the search (``priced_plan``)."""
    priced = evaluate_stages(pricing, assignment, stages)
    delays = StragglerDelays.of(pricing, assignment, priced, stages, shape)
    tasks = step_tasks(predict(pricing, assignment, priced, stages, shape).costs)
    every = tasks.streams.run()
    path = critical_path(every)
    contents = _Contents(
        tasks=tasks,
        blocks=BlockItems.of(delays.pricing, assignment, delays.noise_free),
        levels=level_names(pricing.kept),
        jitter_s=[both / 2 for both in delays.of_passes()],
    )
    on_rank: defaultdict[int, float] = defaultdict(float)
    for span in path:
        contents.add(span)
        on_rank[span.rank] += span.duration_s
    rank = max(sorted(on_rank), key=on_rank.__getitem__)
    found = [(item, seconds) for item, seconds in contents.total().items() if seconds > 0.0]
    return StepPath(
        step_time_s=every[-1].end_s,
        spans=tuple(path),
        items=tuple(sorted(found, key=lambda own: (-own[1], own[0]))),
        rank=rank,
        pipeline_wait_s=_wait_elsewhere(path, every, rank),
    )


@dataclass(slots=True, kw_only=True)
class _Contents:
    """The items of tasks.

    levels: names of what blocks keep. jitter_s: delay in a pass of each stage. spent: seconds. runs: (block, part of a
    pass) -> how often it runs.
    """

    tasks: StepTasks
    blocks: BlockItems
    levels: Sequence[str]
    jitter_s: Sequence[float]
    spent: defaultdict[Item, float] = field(default_factory=lambda: defaultdict(float))
    runs: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, span: Span) -> None:
        """Add a task that ran."""
        passes = self.tasks.passes.get(span.task, [])
        if span.stream == COMPUTE:
            self.spent[_SLOWED] += span.duration_s - span.work_s
            if not passes:
                self.spent[_OPTIMISER] += span.work_s
            for one in passes:
                for part, seconds in self.tasks.compute(one).items():
                    if part in Seconds._fields:
                        self.runs[one.block, part] += 1
                    else:
                        for item, own in self._of_part(part, seconds, one):
                            self.spent[item] += own
        elif span.stream == GATHER:
            self.spent[self.blocks.gather(passes[0].block)] += span.duration_s
        elif span.stream == REDUCE:
            self.spent[self.blocks.reduce(passes[0].block) if passes else _SHARED] += span.duration_s
        else:
            self.spent[_ACTIVATIONS if passes[0].action.kind == "F" else _GRADIENTS] += span.duration_s

    def _of_part(self, part: str, seconds: float, one: BlockPass) -> Iterator[tuple[Item, float]]:
        """Of a part of a pass that is no sum over ops."""
        kind, stage = self.blocks.kind_of(one.block), one.action.stage
        if part == "passing":
            jitter = min(seconds, self.jitter_s[stage])
            yield _JITTER, jitter
            yield _COPIES, seconds - jitter
        elif part == "recomputation":
            level = self.levels[self.tasks.costs.stages[stage].level(one.block)]
            yield Item("recomputation", level, kind), seconds
        elif part == "host":
            yield _HOST, seconds
        elif part == "twice":
            yield Item("split backward", "done in both passes", kind), seconds
        elif part == "prelude":
            yield _PRELUDE, seconds
        elif part == "gather":
            yield self.blocks.gather(one.block), seconds
        else:
            copied = min(seconds, communication_of(self.blocks.copied(one.block), one)[1])
            yield self.blocks.copies(one.block), copied
            yield self.blocks.reduce(one.block), seconds - copied

    def total(self) -> dict[Item, float]:
        """Seconds of everything that was added."""
        found = self.spent.copy()
        for (block, part), times in self.runs.items():
            for item, seconds in self.blocks.items(block):
                found[item] += times * getattr(seconds, part)
        return found


def _wait_elsewhere(path: Sequence[Span], every: Sequence[Span], rank: int) -> float:
    """Seconds of a path on other ranks than ``rank``, and in sends, in which that rank computes nothing."""
    computing = [span for span in every if span.rank == rank and span.stream == COMPUTE]
    times = [time for span in computing for time in (span.start_s, span.end_s)]
    busy = np.cumsum([seconds for span in computing for seconds in (0.0, span.duration_s)])
    found = 0.0
    for span in path:
        if span.rank != rank or span.stream == SEND:
            start, end = np.interp((span.start_s, span.end_s), times, busy)
            found += span.duration_s - float(end - start)
    return found
