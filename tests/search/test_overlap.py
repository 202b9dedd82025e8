"""A step stream by stream: as the action simulator where nothing overlaps, between bounds where something does."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.report.trace import write_trace
from autopar.search.api import estimate_captured
from autopar.search.predict.predict import Predicted
from autopar.search.predict.step_tasks import STREAMS
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult
from tests.search.test_outer import Chain

WIDTHS = (2048, 8192) * 8


@cache
def captured() -> CapturedModel:
    with torch.device("meta"):
        rows = torch.zeros(64, 128, WIDTHS[0]), torch.zeros(64, 128, WIDTHS[-1])
        return normalise(capture(Chain(WIDTHS), rows))


def estimate(gpus: int = 8, stack: str = "autopar", per_node: int = 8, **settings: Any) -> SearchResult:
    given = {"precision": "bf16", "remat": "none"} | settings
    cluster = make_cluster("h100-sxm", gpus, per_node, stack=find_stack(stack))
    return estimate_captured(captured(), cluster, Constraints(**given))


@pytest.mark.parametrize(
    "settings",
    [
        {"gpus": 1, "num_microbatches": 4},
        {"gpus": 4, "pp": 4, "num_microbatches": 8, "schedule": "gpipe"},
        {"gpus": 4, "pp": 4, "num_microbatches": 8},
        {"gpus": 4, "pp": 4, "num_microbatches": 8, "schedule": "interleaved", "virtual_stages": 2},
        {"gpus": 4, "pp": 4, "num_microbatches": 8, "schedule": "zb-h1"},
        {"gpus": 4, "pp": 4, "num_microbatches": 8, "schedule": "zb-2p"},
        {"gpus": 4, "pp": 4, "num_microbatches": 8, "schedule": "zb-v"},
        {"gpus": 4, "pp": 4, "num_microbatches": 8, "schedule": "dualpipe-v"},
        {"gpus": 8, "pp": 2, "tp": 4, "num_microbatches": 8},
    ],
    ids=str,
)
def test_without_data_parallelism_it_is_the_action_simulator(settings: dict[str, Any]) -> None:
    predicted = estimate(**settings).predicted
    # Sends take turns on a link here and slow compute down; there they do neither.
    assert predicted.step_time_s <= predicted.overlapped_s * 1.0001
    assert predicted.overlapped_s == pytest.approx(predicted.step_time_s, rel=0.02 if "pp" not in settings else 0.15)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("chunks", [1, 4])
def test_overlap_lies_between_all_and_nothing(zero: int, chunks: int) -> None:
    predicted = estimate(dp=8, zero=zero, num_microbatches=chunks).predicted
    work: dict[str, float] = defaultdict(float)
    for span in predicted.spans:
        work[span.stream] += span.work_s
    assert (work["gather"] > 0) == (zero > 0) and work["reduce"] > 0
    assert max(work.values()) < predicted.overlapped_s < 1.2 * sum(work.values())
    blocks = len(predicted.costs.blocks)
    gathers = sum(span.stream == "gather" for span in predicted.spans)
    # Stage 3 gathers each block in each pass, stages 1 and 2 once a step.
    assert gathers == blocks * {0: 0, 1: 1, 2: 1, 3: 2 * chunks}[zero]
    reductions = sum(span.stream == "reduce" for span in predicted.spans)
    assert reductions == blocks * (chunks if zero >= 2 else 1)


def test_a_block_waits_for_its_gather_and_no_gather_is_early() -> None:
    predicted = estimate(dp=8, zero=3, num_microbatches=2, prefetch=2).predicted
    compute = [span for span in predicted.spans if span.stream == "compute"]
    gathers = {span.name: span for span in predicted.spans if span.stream == "gather"}
    for number, span in enumerate(compute[:-1]):
        assert gathers[span.name].end_s <= span.start_s + 1e-12
        if number > 2:
            assert gathers[span.name].start_s >= compute[number - 3].end_s - 1e-12


def test_later_stages_are_gathered_beside_earlier_ones_where_the_stack_does_so() -> None:
    shape = {"pp": 2, "dp": 8, "num_microbatches": 2, "schedule": "interleaved", "virtual_stages": 4}
    # Two GPUs a node, so that gathers between nodes take longer than a forward.
    ours, ahead, whole = (
        estimate(gpus=16, per_node=2, stack=stack, zero=zero, **shape).predicted
        for stack, zero in (("autopar", 1), ("megatron-core-2024", 1), ("megatron-core-2024", 0))
    )

    def longest_ahead(predicted: Predicted) -> float:
        """Seconds between the beginning of a gather and the end of the pass that waits for it, the most of rank 0."""
        ends = {span.name.split(" ")[0]: span.end_s for span in predicted.spans if span.stream == "compute"}
        gathers = [span for span in predicted.spans if span.stream == "gather" and span.rank == 0]
        return max(ends[span.name.split(" ")[0]] - span.start_s for span in gathers)

    assert longest_ahead(ahead) > longest_ahead(ours)
    assert ahead.step_time_s - whole.step_time_s < 0.5 * (ours.step_time_s - whole.step_time_s)
    for predicted in (ours, ahead):
        assert predicted.overlapped_s == pytest.approx(predicted.step_time_s, rel=0.3)


def test_the_trace_is_what_viewers_read(tmp_path: Path) -> None:
    found = estimate(pp=2, dp=4, zero=1, num_microbatches=4)
    write_trace(found.plan, found.predicted, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == set(STREAMS)
    ends: dict[tuple[int, int], float] = {}
    spans = [event for event in events if event["ph"] == "X"]
    for event in sorted(spans, key=lambda own: own["ts"]):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(thread, 0.0) - 1e-6, "spans of a thread do not overlap"
        ends[thread] = event["ts"] + event["dur"]
    assert max(ends.values()) == pytest.approx(found.predicted.overlapped_s * 1e6)
    held = [sum(event["args"].values()) for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert len(held) == 2 * 4
    assert max(held) * 2**30 == pytest.approx(found.predicted.memory[0].total, rel=0.1)
