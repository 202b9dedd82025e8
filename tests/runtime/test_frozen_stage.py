"""A rank on which no parameter trains: optimisers, clipping and checkpoints are as on the others."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
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
