"""The trace has every pass of the schedule, on its rank's track, one after the other."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from autopar.export import export
from autopar.ir.errors import InexpressiblePlan
from tests.export.plans import decoder_plan


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-2p", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_every_pass_is_there(schedule: str, virtual: int) -> None:
    plan = decoder_plan(pp=2, tp=2, virtual_stages=virtual, num_microbatches=4, schedule=schedule, predicted=True)
    exported = export(plan, "perfetto")
    events = json.loads(exported.text)["traceEvents"]
    slices: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "rest":
            slices.setdefault(event["pid"], []).append(event)
    orders = plan.pipelining.orders()
    assert {place: [s["name"] for s in found] for place, found in slices.items()} == {
        place: [str(action) for action in order] for place, order in enumerate(orders)
    }
    for found in slices.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(found))
    counters = [event["args"]["count"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(counters) >= 1 and counters[-1] == 0 and min(counters) >= 0
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any(name.startswith("ranks 2-3: stage") for name in names)


def test_the_rest_of_the_step_is_shown_and_said() -> None:
    exported = export(decoder_plan(dp=2, predicted=True), "perfetto")
    (rest,) = [event for event in json.loads(exported.text)["traceEvents"] if event.get("cat") == "rest"]
    assert rest["ts"] + rest["dur"] == pytest.approx(1e6)
    assert any("search --trace" in note for note in exported.notes)


def test_a_plan_without_prediction_is_refused() -> None:
    with pytest.raises(InexpressiblePlan, match="no predicted seconds"):
        export(decoder_plan(dp=2), "perfetto")
