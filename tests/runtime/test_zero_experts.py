"""ZeRO beside experts: each parameter is sharded over the axes on which it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.search.api import predict_plan
from benchmarks.models import CASES, build
from tests.harness import run_ranks

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 shards a module over one mesh")

CASE = CASES["mixtral"]
# Experts on two ranks, twice; the rest over all four.
PLAN = {"ep": 2, "dp": 2, "zero": 3, "shard": 4}
STEPS = 4
OPTIMIZERS: dict[str, dict[str, bool]] = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _numel(named: Any, experts: bool) -> int:
    return sum(p.numel() for name, p in named if (".experts." in name) is experts)


def _train(folder: str, options: dict[str, bool]) -> dict[str, Any]:
    """Four steps; saved after two, and the last two once more from there."""
    model = autopar.parallelize(build(CASE), 4, example_inputs=CASE.batch(0), **PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    path = Path(folder) / "state"
    losses, norms = [], []
    for step in range(STEPS):
        if step == 2:
            autopar.save(model, optimizer, path=path)
        optimizer.zero_grad()
        losses.append(float(model.step(**model.shard_batch(CASE.batch(step)))))
        norms.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
    local = [(name, p.to_local()) for name, p in model.named_parameters()]
    found = {"losses": losses, "norms": norms, "plan": model.plan, "state": model.full_state_dict()}
    found |= {"dense": _numel(local, False), "experts": _numel(local, True)}
    autopar.load(model, optimizer, path=path)
    again = []
    for step in range(2, STEPS):
        optimizer.zero_grad()
        again.append(float(model.step(**model.shard_batch(CASE.batch(step)))))
        model.clip_grad_norm_(1.0)
        optimizer.step()
    dist.barrier()
    return found | {"again": again}


def _alone() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = build(CASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**CASE.batch(step)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("foreach", "fused"))])
def test_trains_as_one_process_does(name: str, tmp_path: Path) -> None:
    losses, norms, state = _alone()
    dense, experts = (_numel(state.items(), which) for which in (False, True))
    for found in run_ranks(_train, 4, str(tmp_path), OPTIMIZERS[name]):
        assert found["plan"].shard_axes == ["dp", "ep"]
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert found["again"] == pytest.approx(losses[2:], rel=1e-5)
        assert found["dense"] == pytest.approx(dense / 4, rel=0.01)
        assert found["experts"] == experts / (2 * 2)
        for parameter, value in state.items():
            torch.testing.assert_close(found["state"][parameter], value, rtol=1e-4, atol=2e-5)


def test_predicted_state_is_what_the_ranks_store() -> None:
    from autopar.ir.capture.capture import capture
    from autopar.passes.normalise import normalise

    captured = normalise(capture(build(CASE), CASE.batch(0)))
    plan = autopar.search(build(CASE), 4, example_inputs=CASE.batch(0), **PLAN)
    memory = predict_plan(captured, make_cluster("cpu", 4, 4), plan).memory[0]
    named = build(CASE).named_parameters()
    whole = sum(p.numel() for _, p in named)
    # Two moments of everything: the experts over the four ranks too, twice two.
    assert memory.optimizer == pytest.approx(8 * whole / 4, rel=0.01)
