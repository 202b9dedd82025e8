"""The critical path of a plan's predicted step, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.report.table import plain_table
from autopar.search.api import priced_plan
from autopar.search.predict.critical_path import step_path
from autopar.units import percent, plural, seconds

# Of what the step waits for, what together is so much of it is printed.
_MOST = 0.98


def critical_path_data(captured: CapturedModel, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """The critical path of a step, as one JSON-ready mapping.

    ``items``: ops, collectives, sends and the rest, the longest first, with seconds of the step and their share; they
    add up to ``step_time_s``, that of the step simulated with streams. ``predicted_step_time_s``: by the closed form
    that plans are compared by. ``ranks``: the ranks of the pipeline that the path leads through, with seconds of the
    step. ``pipeline_wait_s``: how long the path is elsewhere while ``rank``, which has most of it, computes nothing.
    """
    pricing, assignment, stages = priced_plan(captured, cluster, plan)
    path = step_path(pricing, assignment, stages, plan.pipelining)
    visits = [list(spans) for _, spans in groupby(path.spans, key=lambda span: span.rank)]
    return {
        "step_time_s": path.step_time_s,
        "predicted_step_time_s": None if plan.prediction is None else plan.prediction.step_time_s,
        "items": [{**item._asdict(), "step_s": spent, "share": spent / path.step_time_s} for item, spent in path.items],
        "pipeline_wait_s": path.pipeline_wait_s,
        "rank": path.rank,
        "ranks": [{"rank": own[0].rank, "start_s": own[0].start_s, "end_s": own[-1].end_s} for own in visits],
    }


def print_critical_path(found: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Prints the items of the critical path, the longest first, and the time that it waits at the pipeline."""
    console = console or Console(highlight=False)
    step, predicted = found["step_time_s"], found["predicted_step_time_s"]
    known = "" if predicted is None else f"; the prediction, in closed form, is {seconds(predicted)}"
    console.print(f"{seconds(step)} a step, simulated with streams{known}. It waits for:", soft_wrap=True)
    table = plain_table("", "", "of", "over", "a step", "share")
    shown = 0.0
    for number, one in enumerate(found["items"]):
        if number and shown >= _MOST * step:
            rest = plural(len(found["items"]) - number, "more", "more")
            table.add_row(Text(f"and {rest}", "dim"), "", "", "", seconds(step - shown), percent(1 - shown / step))
            break
        shown += one["step_s"]
        table.add_row(one["kind"], one["name"], one["of"], one["axis"], seconds(one["step_s"]), percent(one["share"]))
    console.print(table)
    wait_s = found["pipeline_wait_s"]
    if wait_s:
        console.print(
            f"{seconds(wait_s)} of it ({percent(wait_s / step)}) is waiting at the pipeline: its rank {found['rank']}, "
            "on which most of the path lies, has nothing to compute while the path is elsewhere",
            soft_wrap=True,
        )
