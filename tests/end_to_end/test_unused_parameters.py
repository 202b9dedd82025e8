"""Parameters that the loss does not reach: their values stay, and an optimiser sees that they have no gradient."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.errors import CheckpointError
from tests.harness import run_ranks

ROWS, LENGTH, WIDTH, WORDS = 8, 6, 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Parameters of every kind that the loss does not reach, beside some that it does.

    A layer that forward never calls, one in each block and a whole block of them; shapes that divide over no number of
    ranks, none and no elements; a frozen one; a layer that only evaluation runs; a pooler whose output the loss does
    not read; one whose result is detached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.never = Block()
        self.odd, self.scalar = nn.Parameter(torch.randn(3, 5, 7)), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.evaluated, self.detached = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        if not self.training:
            h = self.evaluated(h)
        h = h + self.detached(h).detach()
        logits = self.head(h) * self.temperature
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"loss": loss, "pooled": torch.tanh(self.pooler(h[:, 0]))}


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(seed: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # Decay of weights moves a parameter whose gradient is zero, and leaves one that has none.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value.detach(), rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n} {text}"
        )


def gradients(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.grad is not None for name, parameter in module.named_parameters()}


def train(ranks: int, constraints: dict[str, Any], folder: str) -> None:
    alone = model()
    parallel = autopar.parallelize(model(), ranks, example_inputs=(batch(0),), **constraints)
    one, many = optimizer_of(alone.parameters()), optimizer_of(parallel.parameters())
    for step in range(2):
        one.zero_grad()
        many.zero_grad()
        loss = alone(batch(step))["loss"]
        loss.backward()
        got = parallel.step(parallel.shard_batch(batch(step)))
        assert abs(float(got) - float(loss.detach())) <= 1e-5 * abs(float(loss.detach()))
        assert gradients(parallel).items() <= gradients(alone).items()
        one.step()
        many.step()
    assert_same(parallel.full_state_dict(), alone.state_dict())
    if parallel.plan.num_stages == 1 and parallel.plan.batch.num_microbatches == 1:
        pool(alone, parallel, one, many)
    autopar.save(parallel, many, folder)
    again = autopar.parallelize(model(), ranks, example_inputs=(batch(0),), **constraints)
    autopar.load(again, optimizer_of(again.parameters()), folder)
    assert_same(again.full_state_dict(), alone.state_dict())


def pool(alone: nn.Module, parallel: nn.Module, one: torch.optim.Optimizer, many: torch.optim.Optimizer) -> None:
    """A step on what the loss of the model does not read."""
    one.zero_grad()
    many.zero_grad()
    alone(batch(2))["pooled"].square().mean().backward()
    parallel(parallel.shard_batch(batch(2)))["pooled"].square().mean().backward()
    assert gradients(alone)["pooler.weight"] and not gradients(alone)["head.weight"]
    assert gradients(parallel).items() <= gradients(alone).items()
    one.step()
    many.step()
    assert_same(parallel.full_state_dict(), alone.state_dict())


def body(ranks: int, plans: list[dict[str, Any]], folder: str) -> None:
    for number, constraints in enumerate(plans):
        train(ranks, constraints, f"{folder}/{number}")
        dist.barrier()


TWO = [
    {"dp": 2, "zero": 0},
    {"dp": 2, "zero": 1, "num_microbatches": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "num_microbatches": 2},
]
FOUR = [
    {"dp": 2, "tp": 2, "zero": 2},
    {"dp": 4, "zero": 3, "shard": 2},
    {"dp": 2, "pp": 2, "zero": 3, "num_microbatches": 2},
    {"dp": 2, "pp": 2, "zero": 1, "schedule": "zb-h1", "num_microbatches": 4},
]


def test_unused_parameters_stay_as_they_are(tmp_path: Any) -> None:
    run_ranks(body, 2, 2, TWO, str(tmp_path))


@pytest.mark.slow
def test_unused_parameters_on_two_axes(tmp_path: Any) -> None:
    run_ranks(body, 4, 4, FOUR, str(tmp_path))


def save_what_trains(folder: str) -> None:
    """Saved under ZeRO-3, loaded under tensor parallelism."""
    first = model()
    first.embed.requires_grad_(False)
    first.blocks[0].requires_grad_(False)
    frozen = {name for name, parameter in first.named_parameters() if not parameter.requires_grad}
    parallel = autopar.parallelize(copy.deepcopy(first), 2, example_inputs=(batch(0),), dp=2, zero=3)
    optimizer = optimizer_of(parallel.parameters())
    parallel.step(parallel.shard_batch(batch(0)))
    optimizer.step()
    autopar.save(parallel, optimizer, folder, trainable_only=True)
    again = autopar.parallelize(copy.deepcopy(first), 2, example_inputs=(batch(0),), tp=2)
    autopar.load(again, optimizer_of(again.parameters()), folder)
    assert_same(again.full_state_dict(), parallel.full_state_dict())
    saved = {name for name in again.full_state_dict() if name not in frozen}
    assert tensors_in(folder) == saved
    other = copy.deepcopy(first)
    with torch.no_grad():
        other.embed.weight[0, 0] += 1
    changed = autopar.parallelize(other, 2, example_inputs=(batch(0),), dp=2, zero=0)
    with pytest.raises(CheckpointError, match="are not those beside which it was trained"):
        autopar.load(changed, None, folder)


def tensors_in(folder: str) -> set[str]:
    from autopar.runtime.checkpoint.contents import METADATA, parse_metadata
    from autopar.runtime.checkpoint.folder import latest

    newest = latest(Path(folder))
    found = parse_metadata((newest / METADATA).read_bytes(), newest).state_dict_metadata
    return {key.removeprefix("model/") for key in found if key.startswith("model/")}


def test_a_checkpoint_holds_what_trains_alone(tmp_path: Any) -> None:
    run_ranks(save_what_trains, 2, str(tmp_path))
