"""State on a local disk: training is what it is in memory, and what cannot be is refused."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import DiskError, InvalidInput, PlanMismatch
from autopar.ir.plan import Plan
from autopar.runtime.disk.state import disk_folder
from tests.harness import RankFailure, run_ranks

WIDTH, ROWS = 48, 8
STEPS = 4


class Net(nn.Module):
    """Its inner width divides by no number of ranks."""

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


class Scaled(nn.Module):
    """All layers read a scale of the first one, which is computed before them: its parameter is not of that block, and
    lies between two that are, as T5's relative positions do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)}) for _ in range(4)
        )
        self.inner[0]["up"].scale = nn.Embedding(2, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, scale = self.first(x), self.inner[0]["up"].scale((y > 4).long())
        for layer in self.inner:
            x = x + layer["down"](layer["up"](x).relu()) * scale
        return nn.functional.cross_entropy(self.head(x), y)


class First(nn.Linear):
    """A block with two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y.tanh(), y.sigmoid()


class Skip(nn.Module):
    """The last block alone reads the second output of the first, whose gradient is there before those between run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = First(WIDTH, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, gate = self.first(x)
        for layer in self.inner:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x * gate), y)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "y": torch.randint(0, 10, (ROWS,), generator=generator),
    }


def on_disk(plan: Plan, most: int = 99) -> Plan:
    """The plan with ``most`` blocks of each stage on disk."""
    stages = [
        stage.model_copy(update={"offload": True, "on_disk": min(most, stage.last - stage.first + 1)})
        for stage in plan.stages
    ]
    return Plan.model_validate(plan.model_copy(update={"stages": stages}).model_dump())


def parallel(folder: str | None, constraints: dict[str, Any], most: int, net: type[nn.Module] = Net) -> Any:
    model, cluster = net(), make_cluster("cpu", dist.get_world_size())
    if not most:
        constraints = {name: value for name, value in constraints.items() if name != "offload"}
    plan = autopar.search(model, cluster, example_inputs=batch(0), **constraints)
    plan = on_disk(plan, most) if most else plan
    return autopar.parallelize(model, cluster, example_inputs=batch(0), plan=plan, disk=folder)


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    folder: str,
    constraints: dict[str, Any],
    most: int,
    kind: str,
    clip: bool,
    clamp: bool = False,
    net: type[nn.Module] = Net,
) -> dict[str, Any]:
    pm = parallel(folder, constraints, most, net)
    optimizer = optimizer_of(kind, pm.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in range(STEPS):
        losses.append(pm.step(**pm.shard_batch(batch(step))))
        if clip:
            losses.append(pm.clip_grad_norm_(0.1))
        optimizer.step()
        scheduler.step()
        if clamp:
            for parameter in pm.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        if step != 2:  # gradients of the third are added to
            optimizer.zero_grad(set_to_none=step > 0)
    disk = pm.engine.disk
    moved = None if disk is None else (disk.traffic.read, disk.traffic.written)
    return {"losses": torch.stack(losses), "parameters": pm.full_state_dict(), "moved": moved}


ZERO3 = {"dp": 2, "zero": 3}
CONSTRAINTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, ZERO3),
    "zero3 microbatches": (2, {**ZERO3, "num_microbatches": 2}),
    "zero2 microbatches": (2, {"dp": 2, "zero": 2, "num_microbatches": 2}),
    "zero1 microbatches": (2, {"dp": 2, "zero": 1, "num_microbatches": 2}),
    "zero3 full": (2, {**ZERO3, "remat": "full", "prefetch": 2}),
    "dp2 pp2 zb-h1": (4, {**ZERO3, "pp": 2, "schedule": "zb-h1", "num_microbatches": 4}),
    "one rank": (1, {"zero": 3, "offload": "on", "num_microbatches": 2}),
    "pp2": (2, {"pp": 2, "offload": "on", "num_microbatches": 4}),
    "dp2 tp2": (4, {"dp": 2, "tp": 2, "zero": 2}),
}


def check(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other["losses"], one["losses"], rtol=1e-6, atol=0)
        for key, value in one["parameters"].items():
            torch.testing.assert_close(other["parameters"][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_training_is_what_it_is_in_memory(name: str, tmp_path: Path) -> None:
    ranks, constraints = CONSTRAINTS[name]
    for kind, clip in (("adamw", True), ("sgd", False)):
        expected = run_ranks(train, ranks, str(tmp_path), constraints, 0, kind, clip)
        found = run_ranks(train, ranks, str(tmp_path), constraints, 99, kind, clip)
        check(expected, found)
        assert all(min(own["moved"]) > 0 for own in found)


def train_slowly(folder: str, constraints: dict[str, Any], most: int, net: type[nn.Module]) -> dict[str, Any]:
    """On a disk that is slow to write, so that much is on its way when the next thing happens."""
    write = os.pwritev

    def slowly(*arguments: Any) -> int:
        time.sleep(0.02)
        return write(*arguments)

    with mock.patch.object(os, "pwritev", slowly):
        return train(folder, constraints, most, "adamw", False, net=net)


@pytest.mark.parametrize(
    ("name", "net"), [("zero3 microbatches", Skip), ("dp2 pp2 zb-h1", Net), ("zero2 microbatches", Scaled)]
)
def test_gradients_are_not_written_before_all_are_added(name: str, net: type[nn.Module], tmp_path: Path) -> None:
    ranks, constraints = CONSTRAINTS[name]
    expected = run_ranks(train_slowly, ranks, str(tmp_path), constraints, 0, net)
    check(expected, run_ranks(train_slowly, ranks, str(tmp_path), constraints, 99, net))


def test_parameters_may_be_changed_between_steps(tmp_path: Path) -> None:
    expected = run_ranks(train, 2, str(tmp_path), ZERO3, 0, "adamw", True, clamp=True)
    check(expected, run_ranks(train, 2, str(tmp_path), ZERO3, 99, "adamw", True, clamp=True))


def test_some_blocks_are_in_host_memory(tmp_path: Path) -> None:
    whole, two = (run_ranks(train, 2, str(tmp_path), ZERO3, most, "adamw", True) for most in (99, 2))
    check(whole, two)
    for one, other in zip(whole, two, strict=True):
        assert 0 < other["moved"][0] < 0.6 * one["moved"][0]


def save_and_load(folder: str, most: int, later: int) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more: by the same module, and by another that loads it."""
    pm = parallel(folder, ZERO3, most)
    optimizer = optimizer_of("adamw", pm.parameters())

    def steps(pm: Any, optimizer: torch.optim.Optimizer, first: int) -> torch.Tensor:
        losses = []
        for step in (first, first + 1):
            losses.append(pm.step(**pm.shard_batch(batch(step))))
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses)

    steps(pm, optimizer, 0)
    autopar.save(pm, optimizer, f"{folder}/saved", step=2, asynchronous=True).wait()
    expected = steps(pm, optimizer, 2)
    other = parallel(folder, ZERO3, later)
    its = optimizer_of("adamw", other.parameters())
    at_once = []

    def count(*_: Any) -> None:
        at_once.append(sum(parameter.grad is not None for parameter in other.parameters()))

    hook = its.register_step_pre_hook(count)
    assert autopar.load(other, its, f"{folder}/saved").step == 2
    hook.remove()
    return {"expected": expected, "found": steps(other, its, 2), "at_once": at_once}


@pytest.mark.parametrize(("most", "later"), [(99, 99), (99, 0), (0, 99)])
def test_checkpoints_go_from_disk_to_memory_and_back(most: int, later: int, tmp_path: Path) -> None:
    for own in run_ranks(save_and_load, 2, str(tmp_path), most, later):
        torch.testing.assert_close(own["found"], own["expected"], rtol=1e-6, atol=0)
        # As many gradients are there together as the largest block has parameters, where state is on disk.
        assert max(own["at_once"]) == (4 if later else sum(own["at_once"]))


def steps_that_fail(folder: str, at: int | None) -> torch.Tensor:
    """Steps from the checkpoint, if there is one; one is written after two. At step ``at`` rank 1 cannot read."""
    pm = parallel(folder, ZERO3, 99)
    optimizer = optimizer_of("adamw", pm.parameters())
    first = autopar.load(pm, optimizer, f"{folder}/saved").step if os.path.exists(f"{folder}/saved") else 0
    losses = []
    for step in range(first, STEPS):
        if step == at and dist.get_rank() == 1:
            os.preadv = _fails  # type: ignore[assignment]  # the disk of this rank, whose process ends with it
        losses.append(pm.step(**pm.shard_batch(batch(step))))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            autopar.save(pm, optimizer, f"{folder}/saved", step=2)
    return torch.stack(losses)


def _fails(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_ends_the_run_with_a_message_and_the_checkpoint_goes_on(tmp_path: Path) -> None:
    (tmp_path / "well").mkdir()
    (tmp_path / "ill").mkdir()
    expected = run_ranks(steps_that_fail, 2, str(tmp_path / "well"), None)
    with pytest.raises(RankFailure) as caught:
        run_ranks(steps_that_fail, 2, str(tmp_path / "ill"), 3)
    said = str(caught.value)
    assert "DiskError" in said
    assert "failed: Input/output error" in said
    assert "what was saved before is kept" in said
    for one, other in zip(expected, run_ranks(steps_that_fail, 2, str(tmp_path / "ill"), None), strict=True):
        torch.testing.assert_close(other, one[2:], rtol=1e-6, atol=0)


def refused(folder: str | None, what: Callable[[Any], object]) -> str:
    try:
        pm = parallel(folder, ZERO3, 99)
        pm.step(**pm.shard_batch(batch(0)))
        what(pm)
    except (InvalidInput, PlanMismatch, DiskError) as error:
        return str(error)
    return "no error"


class Mean(torch.optim.SGD):
    """Of a kind that nobody knows."""


def step_lbfgs(pm: Any) -> None:
    torch.optim.LBFGS(pm.parameters()).step(lambda: 0.0)


def step_unknown(pm: Any) -> None:
    Mean(pm.parameters(), lr=0.1).step()


def step_with_closure(pm: Any) -> None:
    torch.optim.SGD(pm.parameters(), lr=0.1).step(lambda: 0.0)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (step_lbfgs, "LBFGS may read several parameters at once"),
        (step_unknown, "Mean may read several parameters at once"),
        (step_with_closure, "SGD.step takes no closure here"),
    ],
)
def test_optimisers_that_cannot_step_block_by_block_are_refused(what: Any, expected: str, tmp_path: Path) -> None:
    for said in run_ranks(refused, 2, str(tmp_path), what):
        assert said.startswith(expected)
        assert "try:" in said


def test_a_folder_is_needed(tmp_path: Path) -> None:
    for said in run_ranks(refused, 2, None, step_unknown):
        assert "no folder is given" in said
        assert "disk=FOLDER" in said
    for said in run_ranks(refused, 2, str(tmp_path / "absent"), step_unknown):
        assert "no such folder" in said


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_memory_is_no_disk() -> None:
    with pytest.raises(DiskError, match="/dev/shm is in memory"):
        disk_folder(Path("/dev/shm"))


def _freed_in_a_step(folder: str) -> list[float]:
    """Another module, which had state on disk, goes while an optimiser steps, before the last hooks are called."""
    gone: list[Any] = []

    def free(*_: Any) -> None:
        gone.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(free)
    gone.append(parallel(folder, {"zero": 3, "offload": "on"}, 99))
    pm = parallel(folder, {"zero": 3, "offload": "on"}, 99)
    optimizer = optimizer_of("sgd", pm.parameters())
    losses = []
    for step in range(3):
        losses.append(pm.step(**pm.shard_batch(batch(step))).item())
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return losses


def test_a_module_may_be_freed_while_another_ones_optimiser_steps(tmp_path: Path) -> None:
    assert len(run_ranks(_freed_in_a_step, 1, str(tmp_path))[0]) == 3
