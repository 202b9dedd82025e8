"""The predicted step as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) show.

A plan keeps the seconds of its stages, so what is shown is the schedule, simulated again from them: one thread for each
place in the pipeline, a slice for each pass of a microbatch, and a counter of microbatches whose activations are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.cost_model.schedule.pipeline_simulator import Event, Timeline
from autopar.export.exported import Exported, Options
from autopar.export.strategy import Strategy
from autopar.ir.errors import InexpressiblePlan
from autopar.ir.plan import Plan
from autopar.report.timeline import timeline_of

_US = 1e6
_PASSES = {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "backward to weights"}


def write(strategy: Strategy, options: Options) -> Exported:
    """Raises InexpressiblePlan for a plan without a prediction."""
    plan = strategy.plan
    timeline = timeline_of(plan)
    if timeline is None or plan.prediction is None:
        raise InexpressiblePlan(
            "the plan has no predicted seconds of its stages, so there is nothing to trace.\n"
            "  try: autopar search MODEL --like plan.yaml -o predicted.yaml, and export that"
        )
    rest = plan.prediction.step_time_s - timeline.step_time_s
    notes = ["Passes of whole stages. For compute and communication on streams of their own: autopar search --trace."]
    if rest > 0:
        notes.append(
            f"The passes take {timeline.step_time_s:.4g} s of the predicted {plan.prediction.step_time_s:.4g} s; "
            "sends between stages, gradient sums and the optimiser take the rest, shown as one slice at the end."
        )
    events = [*_names(plan), *_passes(timeline), *_rest(plan, timeline, rest), *_kept(timeline)]
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": plan.model.name, "plan": strategy.in_words(), "notes": notes},
    }
    return Exported(target="perfetto", name="step.json", text=json.dumps(trace) + "\n", notes=tuple(notes))


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    size = plan.stage_mesh.size
    for place in range(plan.num_pipeline_ranks):
        first, last = place * size, (place + 1) * size - 1
        stages = ", ".join(str(stage) for stage in plan.pipelining.stages_of(place))
        name = (f"rank {first}" if size == 1 else f"ranks {first}-{last}") + f": stage {stages}"
        yield {"ph": "M", "pid": place, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": place, "name": "process_sort_index", "args": {"sort_index": place}}
        yield {"ph": "M", "pid": place, "tid": 0, "name": "thread_name", "args": {"name": "passes"}}


def _passes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for place, events in enumerate(timeline.events):
        for event in events:
            yield _slice(place, str(event.action), _PASSES[event.action.kind], event.start_s, event.end_s, event)


def _rest(plan: Plan, timeline: Timeline, rest_s: float) -> Iterator[dict[str, Any]]:
    if rest_s > 0:
        for place in range(plan.num_pipeline_ranks):
            start = timeline.step_time_s
            yield _slice(place, "sends, sync and optimiser", "rest", start, start + rest_s)


def _slice(
    place: int, name: str, category: str, start_s: float, end_s: float, event: Event | None = None
) -> dict[str, Any]:
    action = None if event is None else event.action
    return {
        "ph": "X",
        "pid": place,
        "tid": 0,
        "cat": category,
        "name": name,
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
        "args": {} if action is None else {"stage": action.stage, "microbatch": action.microbatch},
    }


def _kept(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Microbatches between their forward and the end of their backward."""
    for place, events in enumerate(timeline.events):
        kept = 0
        for event in events:
            kept += {"F": 1, "B": -1, "W": -1, "I": 0}[event.action.kind]
            yield {
                "ph": "C",
                "pid": place,
                "name": "microbatches kept",
                "ts": event.end_s * _US,
                "args": {"count": kept},
            }
