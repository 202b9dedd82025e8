"""The seconds of a step are shown with the axis that they are spent on."""

from __future__ import annotations

import pytest
import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.ops import composite
from autopar.ir.placed.assign import spread
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, priced_plan
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.forbidden_placements import Forbidden

transformers = pytest.importorskip("transformers")


def test_a_dispatch_counts_for_its_axis_in_every_stage() -> None:
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            vocab_size=4096, hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=8, use_cache=False,
        )  # fmt: skip
        built, tokens = transformers.MixtralForCausalLM(config), torch.zeros((16, 128), dtype=torch.long)
    captured = normalise(capture(built, {"input_ids": tokens, "labels": tokens.clone()}))
    others = [Forbidden(pattern="*/moe", placement=(("ep", choice),)) for choice in ("experts", "d0", None)]
    constraints = Constraints(
        pp=2, ep=2, tp=2, dp=1, zero=1, num_microbatches=8, precision="bf16", forbidden=tuple(others)
    )
    cluster = make_cluster("h100-sxm", 8)
    result = estimate_captured(captured, cluster, constraints)
    found = result.predicted
    assert found.forward_s[1] > found.forward_s[0], "the stage with the loss has most to do, and no first block"
    pricing, assignment, stages = priced_plan(captured, cluster, result.plan, workload=result.workload)
    placed = spread(pricing.workload.analysis, assignment)
    experts = next(node for node in placed if node.target is composite.moe)
    layers = stages[1].last - stages[1].first
    dispatch_s = 8 * layers * pricing.lowering(experts, placed[experts]).total_s
    assert found.breakdown_s["communication_ep"] > 0.9 * dispatch_s > 0.0
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)
