"""A parameter of fewer rows than ZeRO has ranks is cut along another dimension, evenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.placed.storage import zero_dim
from tests.harness import run_ranks
from tests.parity import relative

WIDTH, RANKS = 8, 4


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2, 8, 6), 1), ((2, 6, 8), 2), ((4, 8), 0), ((50257, 768), 0), ((5, 8), 1), ((2, 3, 5), 0), ((3,), 0), ((), 0)],
)
def test_the_dimension_that_is_cut(shape: tuple[int, ...], dim: int) -> None:
    assert zero_dim(shape, RANKS) == dim


class Few(nn.Module):
    """Two matrices in a stack, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.stack = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.before(x).expand(2, *x.shape), self.stack).sum(0).square().mean()


def _built() -> Few:
    torch.manual_seed(0)
    return Few()


def _batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(folder: str) -> dict[str, Any]:
    """Two steps, saved; then two more; and these once more from what was saved, with whole parameters."""
    found: dict[str, Any] = {}
    model = autopar.parallelize(_built(), RANKS, example_inputs=(_batch(0),), dp=RANKS, zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    path = Path(folder) / "state"

    def steps(model: Any, optimizer: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 2):
            optimizer.zero_grad()
            losses.append(float(model.step(model.shard_batch(_batch(step)))))
            losses.append(float(model.clip_grad_norm_(0.05)))
            optimizer.step()
        return losses

    found["losses"] = steps(model, optimizer, 0)
    autopar.save(model, optimizer, path=path)
    found["losses"] += steps(model, optimizer, 2)
    found["stack"] = next(p for n, p in model.named_parameters() if n == "stack").to_local().shape
    found["state"] = model.full_state_dict()
    whole = autopar.parallelize(_built(), RANKS, example_inputs=(_batch(0),), dp=RANKS, zero=0)
    other = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    autopar.load(whole, other, path=path)
    found["again"] = steps(whole, other, 2)
    return found


def test_it_trains_and_is_saved_as_others_are(tmp_path: Path) -> None:
    model = _built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(_batch(step))
        loss.backward()
        losses.append(float(loss.detach()))
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    for found in run_ranks(_train, RANKS, str(tmp_path)):
        assert found["stack"] == (2, WIDTH // RANKS, WIDTH)
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["again"] == pytest.approx(losses[4:], rel=1e-5)
        assert relative(found["state"], dict(model.state_dict())) < 1e-4
