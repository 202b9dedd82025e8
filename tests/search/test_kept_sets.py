"""Plans whose blocks keep points of their frontiers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.stacks.known import AUTOPAR
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.rematerialisation import LEVELS
from autopar.passes.normalise import normalise
from autopar.search.api import predict_plan, search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult

PINNED = Constraints(precision="bf16", dp=8, pp=1, tp=1, zero=1, num_microbatches=1)


@cache
def model() -> CapturedModel:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        tokens = torch.zeros(32, 2048, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        decoder = transformers.LlamaForCausalLM(config).train()
    return normalise(capture(decoder, inputs))


@cache
def roomy() -> SearchResult:
    return search_captured(model(), make_cluster("h100-sxm", 8), replace(PINNED, remat="none"))


def tight(share: float) -> Cluster:
    """Devices with a share of the memory that the plan needs which keeps everything."""
    needed = roomy().predicted.peak_bytes
    full = search_captured(model(), make_cluster("h100-sxm", 8), replace(PINNED, remat="full")).predicted.peak_bytes
    return make_cluster("h100-sxm", 8).with_memory(int((full + share * (needed - full)) / PINNED.memory_share))


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_sets_are_faster_than_levels(share: float) -> None:
    cluster = tight(share)
    stack = replace(AUTOPAR, name="levels", keeps_any=False)
    levels = replace(cluster, device=replace(cluster.device, stack=stack))
    own, others = (search_captured(model(), given, PINNED) for given in (cluster, levels))
    assert own.plan.kept_sets
    assert not others.plan.kept_sets
    assert own.predicted.step_time_s < others.predicted.step_time_s
    assert own.predicted.peak_bytes <= cluster.device.usable_bytes
    read = Plan.from_yaml(own.plan.to_yaml())
    assert predict_plan(model(), cluster, read).step_time_s == pytest.approx(own.predicted.step_time_s)


def test_a_share_is_met_by_every_block() -> None:
    cluster = make_cluster("h100-sxm", 8)
    found = search_captured(model(), cluster, replace(PINNED, remat=0.4))
    assert set(found.plan.kept_sets) == {"keep40"}
    assert all(set(stage.remat) == {"keep40"} for stage in found.plan.stages)
    full = search_captured(model(), cluster, replace(PINNED, remat="full"))
    assert full.predicted.kept_bytes[0] < found.predicted.kept_bytes[0] <= 0.4 * roomy().predicted.kept_bytes[0]
    assert roomy().predicted.step_time_s < found.predicted.step_time_s < full.predicted.step_time_s


def test_a_share_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InfeasiblePlan, match=r"blocks that keep 0\.9 of what autograd would save do not fit"):
        search_captured(model(), tight(0.3), replace(PINNED, remat=0.9))


def test_activations_have_a_budget() -> None:
    cluster, most = make_cluster("h100-sxm", 8), 0.5 * roomy().predicted.kept_bytes[0]
    found = search_captured(model(), cluster, replace(PINNED, activation_memory=most))
    assert found.predicted.kept_bytes[0] <= most
    assert any(set(stage.remat) - set(LEVELS) for stage in found.plan.stages)
    with pytest.raises(InfeasiblePlan, match="no plan keeps as little for its backward: the least is"):
        search_captured(model(), cluster, replace(PINNED, activation_memory=1e6))
