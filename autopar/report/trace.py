"""A predicted step as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) show.

A process is a rank of one place in the pipeline, a thread is a stream; counters hold the bytes of activations that the
rank keeps for its backward. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.cost_model.streams import COMPUTE
from autopar.ir.plan import Plan
from autopar.search.overlap import STREAMS
from autopar.search.predict import Predicted

_US = 1e6


def write_trace(plan: Plan, predicted: Predicted, path: Path) -> None:
    """Write the trace of ``predicted``, which is of ``plan``, as JSON."""
    events = [*_names(plan, predicted), *_spans(predicted), *_activations(predicted)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(plan: Plan, predicted: Predicted) -> Iterator[dict[str, Any]]:
    size = plan.stage_mesh.size
    for place in range(plan.num_pipeline_ranks):
        first, last = place * size, (place + 1) * size - 1
        ranks = f"rank {first}" if size == 1 else f"ranks {first}-{last}, one of them"
        stages = ", ".join(str(stage) for stage in plan.pipelining.stages_of(place))
        name = f"{ranks}" if plan.num_stages == 1 else f"{ranks}: stage {stages}"
        yield {"ph": "M", "pid": place, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": place, "name": "process_sort_index", "args": {"sort_index": place}}
        for number, stream in enumerate(STREAMS):
            yield {"ph": "M", "pid": place, "tid": number, "name": "thread_name", "args": {"name": stream}}


def _spans(predicted: Predicted) -> Iterator[dict[str, Any]]:
    for span in predicted.spans:
        if span.work_s:
            yield {
                "ph": "X",
                "pid": span.rank,
                "tid": STREAMS.index(span.stream),
                "cat": span.stream,
                "name": span.name,
                "ts": span.start_s * _US,
                "dur": (span.end_s - span.start_s) * _US,
                "args": {"alone_us": span.work_s * _US},
            }


def _activations(predicted: Predicted) -> Iterator[dict[str, Any]]:
    """What each rank keeps, after each of its passes."""
    costs = predicted.costs
    for place, order in enumerate(costs.shape.orders()):
        ends = _ends(predicted, place)
        kept = 0.0
        for action in order:
            stage, kind, _ = action
            bytes_of_stage = costs.kept_bytes[stage]
            kept += bytes_of_stage if kind == "F" else -bytes_of_stage if kind in "BW" else 0.0
            yield {
                "ph": "C",
                "pid": place,
                "name": "activations",
                "ts": ends[str(action)] * _US,
                "args": {"GiB": kept / 2**30},
            }


def _ends(predicted: Predicted, place: int) -> dict[str, float]:
    """Pass -> when its last block was through."""
    mine = (span for span in predicted.spans if span.rank == place and span.stream == COMPUTE)
    return {span.name.split(" ")[0]: span.end_s for span in mine}
