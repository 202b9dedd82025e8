"""Experts with interleaved gates, and with weights in rows, on two ranks with half of the experts each."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import autopar
from tests.harness import run_ranks


def _train(name: str) -> dict[str, Any]:
    case = importlib.import_module(f"tests.cases.{name}")
    torch.manual_seed(0)
    parallel = autopar.parallelize(case.model(), 2, example_inputs=case.batch(0), ep=2)
    loss = parallel.step(*parallel.shard_batch(case.batch(1)))
    experts_axes = [axes for block in parallel.plan.blocks for op, axes in block.ops.items() if op.endswith("moe")]
    return {"loss": loss, "gradients": parallel.full_gradients(), "moe": experts_axes}


@pytest.mark.parametrize("name", ["experts_with_clamped_gates", "experts_with_weights_by_row"])
def test_tokens_are_dispatched_to_experts(name: str) -> None:
    case = importlib.import_module(f"tests.cases.{name}")
    torch.manual_seed(0)
    model = case.model()
    loss = model(*case.batch(1))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for result in run_ranks(_train, 2, name):
        torch.testing.assert_close(result["loss"], loss.detach())
        torch.testing.assert_close(result["gradients"], gradients, rtol=1e-4, atol=1e-6)
        assert result["moe"] and all("experts" in axes["ep"] for axes in result["moe"])
