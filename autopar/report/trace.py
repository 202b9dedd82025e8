"""A predicted step as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) show.

A process is a rank of one place in the pipeline, a thread is a stream; a counter holds what the rank has in memory, by
kind. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.ir.plan import Plan
from autopar.search.predict.predict import Predicted
from autopar.search.predict.step_tasks import STREAMS, pass_ends

_US = 1e6


def write_trace(plan: Plan, predicted: Predicted, path: Path) -> None:
    """Write the trace of ``predicted``, which is of ``plan``, as JSON."""
    events = [*_names(plan, predicted), *_spans(predicted), *_memory(predicted)]
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


def _memory(predicted: Predicted) -> Iterator[dict[str, Any]]:
    """What each rank holds in each of its passes, by kind."""
    ends = pass_ends(predicted.spans)
    for place in range(len(predicted.memory)):
        for action, parts in predicted.memory_profile(place):
            yield {
                "ph": "C",
                "pid": place,
                "name": "memory",
                "ts": ends[place, str(action)] * _US,
                "args": {f"{name} GiB": held / 2**30 for name, held in parts.as_bytes().items()},
            }
