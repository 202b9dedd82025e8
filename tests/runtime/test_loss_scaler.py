"""float16 with loss scaling: close to float32, exact in its scaling, and agreed on what to skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.errors import InvalidInput
from tests.end_to_end.stacks import batch, stack
from tests.harness import run_ranks

STEPS = 4


def _train(constraints: dict[str, Any], precision: str, clip: float | None = None, calls: int = 1) -> dict[str, Any]:
    """STEPS steps of ``calls`` batches each."""
    pm = autopar.parallelize(stack(), dist.get_world_size(), example_inputs=batch(), precision=precision, **constraints)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
    # Not scaled enough to overflow, but enough that gradients left scaled would be seen.
    scaler = autopar.LossScaler(pm, scale=2.0**8, growth_interval=2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        numbers = range(step * calls, (step + 1) * calls)
        losses += [float(pm.step(**pm.shard_batch(batch(number)))) for number in numbers]
        norms.append(float(pm.clip_grad_norm_(clip or 1e9)))
        assert scaler.step(optimizer)
    assert scaler.scale == 2.0**10
    return {"losses": losses, "norms": norms, "state": pm.full_state_dict()}


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"dp": 2, "zero": 0}),
    "tp2": (2, {"tp": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "pp2": (2, {"pp": 2, "num_microbatches": 2}),
}


def _train_each(cases: list[tuple[dict[str, Any], str, float | None, int]]) -> list[Any]:
    return [_train(*case) for case in cases]


def test_float16_and_bfloat16_follow_float32() -> None:
    cases = [(constraints, precision, 0.5, 2) for _, constraints in PLANS.values() for precision in ("fp16", "bf16")]
    (reference,) = run_ranks(_train_each, 1, [({}, "fp32", 0.5, 2)])[0]
    for rank in run_ranks(_train_each, 2, cases):
        for (constraints, precision, *_), result in zip(cases, rank, strict=True):
            assert result["losses"] == pytest.approx(reference["losses"], rel=0.01), f"{constraints} {precision}"
            assert result["norms"] == pytest.approx(reference["norms"], rel=0.02), f"{constraints} {precision}"
            assert all(value.dtype == torch.float32 for value in result["state"].values())


def test_scaling_changes_no_digit() -> None:
    """In float32, with and without; gradients of several calls too, under ZeRO and in buckets."""
    for constraints in (PLANS["zero3"][1], PLANS["dp2"][1]):
        for scaled, plain in run_ranks(_both, 2, constraints):
            torch.testing.assert_close(scaled, plain, rtol=0, atol=0)


def _both(constraints: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    found = []
    for scaled in (True, False):
        pm = autopar.parallelize(stack(), dist.get_world_size(), example_inputs=batch(), **constraints)
        if scaled:
            autopar.LossScaler(pm)
        for call in range(2):
            pm.step(**pm.shard_batch(batch(call)))
        found.append(pm.full_gradients())
    return found


def _overflow(constraints: dict[str, Any], folder: str) -> list[tuple[float, bool, bool]]:
    """(scale, stepped, changed) of each step; on the last rank alone a gradient of the second is not finite."""
    pm = autopar.parallelize(stack(), dist.get_world_size(), example_inputs=batch(), precision="fp16", **constraints)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    scaler = autopar.LossScaler(pm, scale=1024.0)
    found: list[tuple[float, bool, bool]] = []

    def overflow(parameter: torch.Tensor) -> None:
        if len(found) == 1 and dist.get_rank() == dist.get_world_size() - 1:
            assert parameter.grad is not None
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.fill_(float("inf"))

    (*_, last) = pm.parameters()
    last.register_post_accumulate_grad_hook(overflow)
    for step in range(3):
        before = pm.full_state_dict()
        pm.step(**pm.shard_batch(batch(step)))
        stepped = scaler.step(optimizer)
        optimizer.zero_grad()
        after = pm.full_state_dict()
        found.append((scaler.scale, stepped, any(not torch.equal(before[name], after[name]) for name in before)))
        assert all(value.isfinite().all() for value in after.values())
    autopar.save(pm, optimizer, folder, scaler=scaler)
    other = autopar.LossScaler(pm)
    autopar.load(pm, optimizer, folder, scaler=other)
    assert other.state_dict() == {"scale": 512.0, "good_steps": 1}
    return found


@pytest.mark.parametrize("plan", ["pp2", "tp2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(plan: str, tmp_path: Path) -> None:
    for rank in run_ranks(_overflow, 2, PLANS[plan][1], str(tmp_path)):
        assert rank == [(1024.0, True, True), (512.0, False, False), (512.0, True, True)]


def _real_overflow() -> list[tuple[float, bool]]:
    pm = autopar.parallelize(stack(), dist.get_world_size(), example_inputs=batch(), precision="fp16", dp=2)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="unless the loss is scaled"):
        pm.step(**pm.shard_batch(batch()))
    scaler = autopar.LossScaler(pm, scale=2.0**40)
    found = []
    for step in range(40):
        pm.step(**pm.shard_batch(batch(step)))
        found.append((scaler.scale, scaler.step(optimizer)))
        optimizer.zero_grad()
        if found[-1][1]:
            break
    return found


def test_the_scale_falls_until_gradients_fit() -> None:
    for rank in run_ranks(_real_overflow, 2):
        scales = [scale for scale, _ in rank]
        assert scales == [2.0 ** (40 - number) for number in range(len(scales))]
        assert 2 < len(scales) < 40 and rank[-1][1]
