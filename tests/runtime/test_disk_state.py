"""State on a local disk: training is what it is in memory, bit by bit, and little of it is in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.plan import Plan
from tests.harness import run_ranks

WIDTH, ROWS = 64, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.GELU(), nn.Linear(2 * WIDTH + 1, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "y": torch.randint(0, 10, (ROWS,), generator=generator),
    }


def plan_on_disk(plan: Plan, blocks: int | None) -> Plan:
    stages = []
    for stage in plan.stages:
        count = stage.last - stage.first + 1 if blocks is None else blocks
        stages.append(stage.model_copy(update={"offload": True, "on_disk": count or None}))
    return Plan.model_validate(plan.model_copy(update={"stages": stages}).model_dump())


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(folder: str, constraints: dict[str, Any], on_disk: bool, kind: str, clip: bool) -> dict[str, Any]:
    cluster = make_cluster("cpu", torch.distributed.get_world_size())
    model = Net()
    plan = autopar.search(model, cluster, example_inputs=batch(0), **constraints)
    if on_disk:
        plan = plan_on_disk(plan, None)
    pm = autopar.parallelize(model, cluster, example_inputs=batch(0), plan=plan, disk=folder if on_disk else None)
    optimizer = optimizer_of(kind, pm.parameters())
    losses = []
    for step in range(4):
        losses.append(pm.step(**pm.shard_batch(batch(step))))
        if clip:
            losses.append(pm.clip_grad_norm_(0.1))
        optimizer.step()
        if step != 2:  # gradients of the third are added to
            optimizer.zero_grad()
    found = {"losses": torch.stack(losses), "parameters": pm.full_state_dict()}
    if on_disk:
        traffic = pm.engine.disk.traffic
        found["traffic"] = (traffic.read, traffic.written)
    return found


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2, "zero": 3},
    "zero3 microbatches": {"dp": 2, "zero": 3, "num_microbatches": 2},
    "zero2 microbatches": {"dp": 2, "zero": 2, "num_microbatches": 2},
    "zero1 microbatches": {"dp": 2, "zero": 1, "num_microbatches": 2},
    "zero3 full": {"dp": 2, "zero": 3, "remat": "full"},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize(("kind", "clip"), [("adamw", True), ("sgd", False)])
def test_training_is_what_it_is_in_memory(name: str, kind: str, clip: bool, tmp_path: Path) -> None:
    expected = run_ranks(train, 2, str(tmp_path), CONSTRAINTS[name], False, kind, clip)
    found = run_ranks(train, 2, str(tmp_path), CONSTRAINTS[name], True, kind, clip)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other["losses"], one["losses"], rtol=1e-6, atol=0)
        for key, value in one["parameters"].items():
            torch.testing.assert_close(other["parameters"][key], value, rtol=1e-5, atol=1e-7)
        print(other["traffic"])
