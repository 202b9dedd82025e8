"""The critical path of a predicted step: as long as the step, without a gap, and made of the plan's ops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, predict_plan, priced_plan
from autopar.search.predict.critical_path import StepPath, step_path
from autopar.search.predict.predict import Predicted
from autopar.search.problem.constraints import Constraints
from benchmarks.models import language_batch, llama
from tests.search.test_outer import Chain

WIDTHS = (2048, 8192) * 8


@cache
def chain() -> CapturedModel:
    with torch.device("meta"):
        rows = torch.zeros(64, 128, WIDTHS[0]), torch.zeros(64, 128, WIDTHS[-1])
        return normalise(capture(Chain(WIDTHS), rows))


@cache
def decoder() -> CapturedModel:
    return normalise(capture(llama(), language_batch(0)))


def found(
    captured: CapturedModel, gpus: int, gpu: str = "h100-sxm", network: float = 1.0, **settings: Any
) -> tuple[Predicted, StepPath]:
    cluster = make_cluster(gpu, gpus, 8).with_network(network)
    plan = estimate_captured(captured, cluster, Constraints(**settings)).plan
    return predict_plan(captured, cluster, plan), step_path(*priced_plan(captured, cluster, plan), plan.pipelining)


PLANS = [
    {"gpus": 1, "num_microbatches": 4},
    {"gpus": 8, "tp": 8, "num_microbatches": 2},
    {"gpus": 8, "dp": 8, "zero": 0, "num_microbatches": 1, "remat": "full"},
    {"gpus": 4, "dp": 4, "zero": 3, "num_microbatches": 2},
    {"gpus": 4, "pp": 2, "dp": 2, "zero": 1, "num_microbatches": 4, "remat": "selective"},
    {"gpus": 4, "pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "zb-h1"},
    {"gpus": 4, "pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
]


@pytest.mark.parametrize("gpu", ["h100-sxm", "cpu"])
@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_it_is_as_long_as_the_step_and_made_of_what_the_plan_runs(settings: dict[str, Any], gpu: str) -> None:
    predicted, path = found(decoder(), gpu=gpu, **settings)
    assert path.step_time_s == pytest.approx(predicted.overlapped_s, rel=1e-12)
    end_s = 0.0
    for span in path.spans:
        assert span.start_s == pytest.approx(end_s, rel=1e-9), "one task begins when the one before it ends"
        end_s = span.end_s
    assert end_s == pytest.approx(path.step_time_s, rel=1e-9)
    assert sum(span.duration_s for span in path.spans) == pytest.approx(path.step_time_s, rel=1e-9)
    # Ops and collectives are priced one by one, blocks as sums: this holds if nothing is left out or counted twice.
    assert sum(seconds for _, seconds in path.items) == pytest.approx(path.step_time_s, rel=1e-9)
    assert all(seconds > 0 for _, seconds in path.items)
    assert [s for _, s in path.items] == sorted((s for _, s in path.items), reverse=True)
    assert (path.pipeline_wait_s > 0) == ("pp" in settings)
    assert 0 <= path.pipeline_wait_s < path.step_time_s


def by_kind(path: StepPath) -> dict[str, float]:
    kinds: Counter[str] = Counter()
    for item, seconds in path.items:
        kinds[f"{item.kind} {item.axis}".strip()] += seconds / path.step_time_s
    return kinds


def test_tensor_parallelism_waits_for_its_collectives() -> None:
    _, path = found(decoder(), 16, tp=16, num_microbatches=1)
    shares = by_kind(path)
    assert shares["collective tp"] > 0.5, "small blocks on two nodes"
    names = {item.name for item, _ in path.items if item.kind == "collective"}
    assert names & {"all_reduce", "all_gather", "reduce_scatter"}


def test_zero_3_waits_for_the_gathers_that_compute_does_not_hide() -> None:
    shares = {}
    for network in (1.0, 0.1):
        predicted, path = found(chain(), 16, network=network, dp=16, zero=3, num_microbatches=1)
        exposed = sum(s for item, s in path.items if item.kind == "collective")
        assert 0 < exposed < sum(span.work_s for span in predicted.spans if span.stream in ("gather", "reduce"))
        shares[network] = exposed / path.step_time_s
    assert shares[1.0] < 0.1 < 0.5 < shares[0.1]
    assert {item.name for item, _ in path.items if item.kind == "collective"} == {"all_gather", "reduce_scatter"}


def test_a_pipeline_waits_for_its_other_stages() -> None:
    one, path = found(chain(), 4, pp=4, num_microbatches=4, precision="bf16", remat="none")
    kinds = by_kind(path)
    assert kinds["send pp"] > 0
    # Equal stages: the first waits P - 1 passes of each of M + P - 1.
    assert path.pipeline_wait_s / path.step_time_s == pytest.approx(one.timeline.bubble_fraction, rel=0.15)


def test_copies_of_a_core_for_all_reduces_are_not_waiting() -> None:
    captured, plain = decoder(), make_cluster("cpu", 2, 2)
    seconds = {}
    for overlap in (1.0, 0.25):
        cluster = replace(plain, intra_node=replace(plain.intra_node, overlap=overlap))
        plan = estimate_captured(captured, cluster, Constraints(dp=2, zero=0, num_microbatches=1)).plan
        path = step_path(*priced_plan(captured, cluster, plan), plan.pipelining)
        seconds[overlap] = Counter({"copies": 0.0, "all_reduce": 0.0})
        for item, spent in path.items:
            if item.of.startswith("gradients"):
                seconds[overlap][item.name] += spent
    reduced = seconds[1.0]
    assert reduced["copies"] == 0.0 < reduced["all_reduce"], "what compute does not hide is waited for"
    assert seconds[0.25]["copies"] > seconds[0.25]["all_reduce"], "three quarters of every one need the core"
