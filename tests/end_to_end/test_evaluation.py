"""Evaluation under every plan: the outputs and losses of the plain model in eval mode, and training undisturbed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.errors import AutoparError
from tests.harness import run_ranks

BATCH, WIDTH = 8, 16


class Layer(nn.Module):
    """Dropout, and a counter and noise that only training has."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.training:
            self.seen += 1
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        return x + F.dropout(self.down(hidden), 0.2, self.training)


class Normed(nn.Module):
    """A block with batch statistics, which microbatches do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Shallow(Layer):
    """Of such blocks evaluation runs the first two alone."""


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.num_evaluated = 2 if block is Shallow else 4
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(x)
        for layer in self.layers if self.training else list(self.layers)[: self.num_evaluated]:
            x = layer(x)
        scores = self.head(x)
        if labels is None:
            return {"scores": scores, "mode": "no labels"}
        loss = F.cross_entropy(scores, labels, ignore_index=-1)
        return {"loss": loss, "scores": scores, "classes": scores.argmax(1), "mode": self.training}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (BATCH,), generator=generator)
    labels[seed % 3 : 3] = -1  # the ranks have unequal numbers of labels
    return {"x": torch.randn(BATCH, 8, generator=generator), "labels": labels}


def built(block: type[nn.Module], constraints: dict[str, Any]) -> tuple[nn.Module, autopar.ParallelModule]:
    torch.manual_seed(0)
    model = Net(block)
    plain = copy.deepcopy(model)
    return plain, autopar.parallelize(model, dist.get_world_size(), example_inputs=batch(0), **constraints)


def train(block: type[nn.Module], constraints: dict[str, Any], evaluating: bool) -> tuple[Any, float]:
    """Losses, state and the caller's random numbers after ten steps; the largest error of the evaluations between."""
    plain, pm = built(block, constraints)
    plain.eval()
    optimizer = torch.optim.Adam(pm.parameters(), lr=0.01)
    losses, error = [], 0.0
    for step in range(10):
        losses.append(float(pm.step(**pm.shard_batch(batch(step)))))
        if evaluating and step % 3 == 0:
            # Between the gradients and the step that uses them.
            error = max(error, evaluate(plain, pm, batch(100 + step)))
        optimizer.step()
        optimizer.zero_grad()
    return (losses, pm.full_state_dict(), torch.rand(2)), error


def evaluate(plain: nn.Module, pm: autopar.ParallelModule, given: dict[str, Tensor]) -> float:
    before = {name: value.clone() for name, value in pm.full_state_dict().items()}
    plain.load_state_dict(before)
    pm.eval()
    assert not pm.training
    own = pm.shard_batch(given)
    with torch.no_grad():
        got, again, wanted = pm(**own), pm(**own), plain(**given)
    assert got["mode"] is False and list(got) == list(wanted)
    rows = pm.shard_batch({name: wanted[name] for name in ("scores", "classes")})
    assert torch.equal(got["classes"], rows["classes"]) and torch.equal(got["scores"], again["scores"])
    error = float((got["scores"] - rows["scores"]).abs().max())
    with torch.no_grad():
        without = pm(x=own["x"])
    assert list(without) == ["scores", "mode"] and without["mode"] == "no labels"
    error = max(error, float((without["scores"] - rows["scores"]).abs().max()))
    for loss in (got["loss"], pm.loss(**own)):
        error = max(error, abs(float(loss) - float(wanted["loss"])))
    torch.testing.assert_close(pm.full_state_dict(), before, rtol=0, atol=0)
    pm.train()
    return error


def train_each(cases: list[tuple[type[nn.Module], dict[str, Any]]]) -> list[Any]:
    return [[train(block, constraints, evaluating) for evaluating in (False, True)] for block, constraints in cases]


CASES: dict[int, list[tuple[type[nn.Module], dict[str, Any]]]] = {
    2: [
        (Normed, {"dp": 2, "zero": 0}),
        (Normed, {"dp": 2, "zero": 3}),
        (Normed, {"tp": 2}),
        (Normed, {"pp": 2}),
        (Layer, {"dp": 2, "zero": 1, "num_microbatches": 2}),
        (Shallow, {"dp": 2, "zero": 1}),
        (Shallow, {"dp": 2, "zero": 3}),
        (Layer, {"pp": 2, "schedule": "1f1b", "num_microbatches": 4}),
        (Layer, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 2}),
    ],
    4: [
        (Normed, {"dp": 2, "tp": 2, "zero": 0}),
        (Layer, {"dp": 2, "pp": 2, "zero": 2, "num_microbatches": 2}),
        (Layer, {"dp": 2, "pp": 2, "schedule": "zb-v", "virtual_stages": 2, "num_microbatches": 4, "zero": 1}),
    ],
}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_goes_on_as_if_nothing_had_been_evaluated(num_ranks: int) -> None:
    for rank in run_ranks(train_each, num_ranks, CASES[num_ranks]):
        for (block, constraints), (without, with_evaluations) in zip(CASES[num_ranks], rank, strict=True):
            where = f"{block.__name__} under {constraints}"
            assert with_evaluations[0][0] == without[0][0], where
            torch.testing.assert_close(with_evaluations[0], without[0], rtol=0, atol=0)
            assert with_evaluations[1] < 1e-5, where


def refused() -> list[str]:
    _, pm = built(Layer, {"pp": 2})
    pm.eval()
    said = []
    own = batch(0)
    for call in (lambda: pm(**own), lambda: pm.loss(x=own["x"][:3], labels=own["labels"][:2])):
        try:
            call()
        except AutoparError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_evaluated_is_said() -> None:
    for with_gradients, other_rows in run_ranks(refused, 2):
        assert "2 pipeline stages" in with_gradients and "torch.no_grad()" in with_gradients
        assert "[2" in other_rows and "float32[3, 8]" in other_rows and "float32[8, 8]" in other_rows
