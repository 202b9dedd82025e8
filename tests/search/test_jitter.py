"""Straggler delays: ranks with jitter wait where they meet, the longer the more they compute in between."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, predict_plan
from autopar.search.predict.predict import Predicted
from autopar.search.problem.constraints import Constraints
from tests.search.test_outer import Chain

WIDTHS = (2048, 8192) * 4
JITTER_S = 1e-4


@cache
def captured() -> CapturedModel:
    with torch.device("meta"):
        rows = torch.zeros(64, 128, WIDTHS[0]), torch.zeros(64, 128, WIDTHS[-1])
        return normalise(capture(Chain(WIDTHS), rows))


def on(jitter_s: float) -> Cluster:
    cluster = make_cluster("h100-sxm", 4, 8)
    return replace(cluster, device=replace(cluster.device, jitter_s=jitter_s))


def plan(**degrees: Any) -> Plan:
    constraints = Constraints(precision="bf16", remat="none", zero=0, **degrees)
    return estimate_captured(captured(), on(0.0), constraints).plan


def predicted(jitter_s: float, own: Plan) -> Predicted:
    return predict_plan(captured(), on(jitter_s), own)


def test_waits_are_as_long_as_jitter_and_one_rank_has_none() -> None:
    own = plan(tp=4, num_microbatches=1)
    noise_free, some, more = (predicted(n * JITTER_S, own) for n in (0, 1, 4))
    assert "waiting" not in noise_free.breakdown_s
    assert some.breakdown_s["waiting"] > 0.0
    assert more.step_time_s - noise_free.step_time_s == pytest.approx(4 * (some.step_time_s - noise_free.step_time_s))
    assert sum(more.breakdown_s.values()) == pytest.approx(more.step_time_s)
    alone = estimate_captured(captured(), make_cluster("h100-sxm", 1, 8), Constraints(precision="bf16")).plan
    cluster = make_cluster("h100-sxm", 1, 8)
    noisy = replace(cluster, device=replace(cluster.device, jitter_s=JITTER_S))
    times = [predict_plan(captured(), each, alone).step_time_s for each in (cluster, noisy)]
    assert times[0] == times[1]


def test_a_pass_waits_by_the_root_of_its_work_and_of_its_collectives() -> None:
    own = plan(tp=4, num_microbatches=1)
    waited = predicted(JITTER_S, own).forward_s[0] - predicted(0.0, own).forward_s[0]
    # Column and row parallel layers in turn: one all-reduce for each pair, and at most one more at an end.
    work = predicted(0.0, plan(dp=1, tp=4, num_microbatches=1)).breakdown_s["compute"] / 3
    pairs = len(WIDTHS) / 2
    least, most = (JITTER_S * (work / 1e-3 * count) ** 0.5 for count in (pairs - 1, pairs + 2))
    assert 0.8 * least < waited < 1.2 * most


def test_a_pass_of_a_pipeline_waits_for_what_it_receives() -> None:
    own = plan(pp=4, num_microbatches=8)
    noise_free, noisy = (predicted(n * JITTER_S, own) for n in (0, 1))
    for before, after in zip(noise_free.forward_s, noisy.forward_s, strict=True):
        assert after - before == pytest.approx(JITTER_S * (before / 1e-3) ** 0.5, rel=0.2)


def test_a_step_ends_with_its_slowest_rank_however_seldom_they_meet() -> None:
    own = plan(dp=4, num_microbatches=1)
    noise_free, noisy = (predicted(n * JITTER_S, own) for n in (0, 1))
    work = noise_free.breakdown_s["compute"]
    # One meeting at most beside the end: the sum of a count.
    least = JITTER_S * (work / 1e-3) ** 0.5
    assert least <= noisy.step_time_s - noise_free.step_time_s + 1e-12
    assert noisy.step_time_s - noise_free.step_time_s < 2.5 * least
