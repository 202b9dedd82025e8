"""Histories of delayed scaling in checkpoints, under one plan and another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from examples.gpt import GPT, Config
from tests.harness import run_ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(Config(width=32, num_layers=2, num_heads=4, num_kv_heads=4, hidden=64, vocabulary=32)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    first, second = (torch.randint(0, 32, (4, 8), generator=generator) for _ in range(2))
    return first, second


def train(how: dict[str, Any], steps: range, saved: str = "", loaded: str = "") -> tuple[list[float], list[Tensor]]:
    """Losses, and the histories at the end. saved, loaded: folders of checkpoints."""
    options = {"num_microbatches": 1, "precision": "fp32+fp8-delayed", **how}
    ranks = options.pop("ranks")
    parallel = autopar.parallelize(model(), ranks, example_inputs=batch(0), **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    if loaded:
        autopar.load(parallel, optimizer, loaded)
    losses = []
    for step in steps:
        losses.append(float(parallel.step(*parallel.shard_batch(batch(step)))))
        optimizer.step()
        optimizer.zero_grad()
    if saved:
        autopar.save(parallel, optimizer, saved)
    return losses, [own.clone() for own in parallel.engine.histories.tensors.values()]


def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    wanted, histories = run_ranks(train, 1, {"ranks": 1}, range(4))[0]
    assert len(histories) == 14 and all(own[:, 1].min() > 0 for own in histories)
    first, _ = run_ranks(train, 2, {"ranks": 2, "dp": 2, "zero": 3}, range(2), saved=folder)[0]
    second, again = run_ranks(train, 2, {"ranks": 2, "tp": 2}, range(2, 4), loaded=folder)[0]
    assert first + second == pytest.approx(wanted, rel=1e-9)
    for own, other in zip(again, histories, strict=True):
        torch.testing.assert_close(own, other)


def test_a_checkpoint_of_another_recipe_begins_a_history(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(train, 1, {"ranks": 1, "precision": "fp32+fp8-tensor"}, range(1), saved=folder)
    _, histories = run_ranks(train, 1, {"ranks": 1}, range(1), loaded=folder)[0]
    assert all(own[0, 2] > 0 and own[0, 3] == 0 for own in histories)


def train_narrow(ranks: int, how: dict[str, Any]) -> tuple[list[Tensor], list[float]]:
    """Histories after a step in bfloat16, and losses at other lengths, whose programs read the same ones."""
    parallel = autopar.parallelize(
        model().float(), ranks, example_inputs=batch(0), num_microbatches=1, precision="fp8-delayed", **how
    )
    parallel.step(*parallel.shard_batch(batch(0)))
    found = [own.clone() for own in parallel.engine.histories.tensors.values()]
    shorter = tuple(own[:, :6] for own in parallel.shard_batch(batch(1)))
    losses = [float(parallel.loss(*shorter))]
    for own, kept in zip(parallel.engine.histories.tensors.values(), found, strict=True):
        assert torch.equal(own, kept), "what is computed without gradients is not noted"
    losses.append(float(parallel.step(*shorter)))
    return found, losses


def test_in_bfloat16_and_at_other_lengths() -> None:
    wanted, losses = run_ranks(train_narrow, 1, 1, {})[0]
    assert len(wanted) == 14 and all(own[:, 2].min() > 0 for own in wanted)
    found, others = run_ranks(train_narrow, 2, 2, {"dp": 2, "zero": 3})[0]
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=0)
    assert others == pytest.approx(losses, rel=1e-3)


class Tied(nn.Module):
    """Two modules with one weight in each of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2)) for _ in range(3))
        for one, other in self.layers:
            other.weight = one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one, other in self.layers:
            x = x + other(one(x).relu())
        return self.last(x).square().mean()


def train_tied() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 16)
    parallel = autopar.parallelize(Tied(), 1, example_inputs=(x,), precision="fp32+fp8-delayed", num_microbatches=1)
    parallel.step(x)
    return {name: own.clone() for name, own in parallel.engine.histories.tensors.items()}


def test_products_of_one_weight_have_a_history_each() -> None:
    found = run_ranks(train_tied, 1)[0]
    assert len(found) == 6
    one, other = found["layers.0.0.weight_history"], found["layers.0.0.weight_history_in_layers_0_1"]
    assert one[1, 2] == other[1, 2] and one[0, 2] != other[0, 2]
