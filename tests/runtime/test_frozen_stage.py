"""A rank on which no parameter trains: optimisers, clipping and checkpoints are as on the others."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from benchmarks.issued import compared
from tests.harness import run_ranks


class Tower(nn.Module):
    """The first two layers, which a pipeline has on its first rank, are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(folder: str) -> tuple[list[float], list[float], int]:
    model, x = Tower(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    alone = copy.deepcopy(model)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pm = autopar.parallelize(model, mesh, example_inputs=x)
    optimizer = torch.optim.AdamW([p for p in pm.parameters() if p.requires_grad], lr=0.1)
    expected = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    losses: list[float] = []
    losses_alone: list[float] = []
    for step in range(4):
        if step == 2:
            autopar.save(pm, optimizer, folder)
            autopar.load(pm, optimizer, folder)
        losses.append(pm.step(x).item())
        pm.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        loss = alone(x)
        losses_alone.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        expected.step()
        expected.zero_grad()
    return losses, losses_alone, sum(p.requires_grad for _, p in pm.named_parameters())


def test_a_stage_of_frozen_layers_has_an_optimiser_too(tmp_path: Path) -> None:
    results = run_ranks(train, 2, str(tmp_path / "run"))
    assert sorted(trained for _, _, trained in results) == [0, 2]
    for losses, alone, _ in results:
        torch.testing.assert_close(losses, alone)


class Deep(Tower):
    """Six layers, the first four of them frozen, so that the second stage of three begins with a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[:4].requires_grad_(False)


def sent(zero: int) -> tuple[list[str], list[float], list[float]]:
    """What is sent otherwise than recorded; gradients and expected gradients of the trained layers."""
    model, x = Deep(), torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, 6, example_inputs=x, dp=2, pp=3, zero=zero, num_microbatches=4)
    found: list[str] = []
    for step in range(2):
        with compared(pm, found) if step else nullcontext():
            pm.step(pm.shard_batch(x))
    for _ in range(2):
        alone(x).backward()
    gradients, trained = pm.full_gradients(), [name for name, p in alone.named_parameters() if p.requires_grad]
    norms = [gradients[name].norm().item() for name in trained]
    return found, norms, [alone.get_parameter(name).grad.norm().item() for name in trained]  # type: ignore[union-attr]


@pytest.mark.parametrize("zero", [0, 3])
def test_no_gradient_goes_back_into_frozen_layers(zero: int) -> None:
    """Nor are their parameters gathered for a backward: what is sent is what is recorded."""
    for found, norms, expected in run_ranks(sent, 6, zero):
        assert found == []
        torch.testing.assert_close(norms, expected)
