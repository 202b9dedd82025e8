"""Bytes that a rank really holds, at every ZeRO stage, against the formulas of the cost model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost_model.memory.model_state import gathered_bytes, scattered_bytes, state_memory
from tests.harness import run_ranks
from tests.runtime.held import Saved, held_bytes

pytestmark = pytest.mark.slow

WIDTH, DEPTH, RANKS = 256, 10, 2
NUMEL = WIDTH * WIDTH * DEPTH
CASES = [(zero, chunks) for zero in range(4) for chunks in (1, 2)]


class Chain(nn.Module):
    """Wide layers on few rows: next to the model's state, activations are nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, target)


def _held(zero: int, chunks: int) -> tuple[float, float]:
    """Bytes between steps, and between forward and backward of the last microbatch of a step."""
    before = held_bytes()
    torch.manual_seed(0)
    rows = torch.randn(RANKS * chunks, WIDTH)
    parallel = autopar.parallelize(
        Chain().to("meta"), RANKS, example_inputs=(rows, rows), pp=1, dp=RANKS, tp=1, cp=1, ep=1, zero=zero,
        num_microbatches=chunks, precision="bf16", remat="none",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(parallel.parameters())
    mine = parallel.shard_batch((rows, rows))
    parallel.step(*mine)
    optimizer.step()
    resting = held_bytes() - before
    saved, inside = Saved(), list[float]()

    def watch(*_: object) -> None:
        inside.append(held_bytes() - before)
        saved.kept.clear()

    parallel.engine.stage.register_forward_hook(watch)
    with saved:
        optimizer.zero_grad(set_to_none=zero > 0)
        parallel.step(*mine)
    return resting, inside[-1]


Held = dict[tuple[int, int], tuple[float, float]]


def _all_held() -> tuple[Held, int]:
    """Bytes of every case, and those left when all models are gone."""
    before = held_bytes()
    held = {case: _held(*case) for case in CASES}
    return held, held_bytes() - before


@pytest.fixture(scope="module")
def measured() -> tuple[Held, int]:
    result: tuple[Held, int] = run_ranks(_all_held, RANKS)[0]
    return result


@pytest.fixture(scope="module")
def held(measured: tuple[Held, int]) -> Held:
    return measured[0]


def test_nothing_is_left_of_models_that_are_gone(measured: tuple[Held, int]) -> None:
    assert measured[1] < NUMEL / 100


@pytest.mark.parametrize(("zero", "chunks"), CASES)
def test_between_steps(zero: int, chunks: int, held: Held) -> None:
    # Parameters gathered for a step are resharded after it, at every ZeRO stage.
    expected = 16 * NUMEL / (RANKS if zero else 1)
    assert held[zero, chunks][0] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("zero", "chunks"), CASES)
def test_inside_a_step(zero: int, chunks: int, held: Held) -> None:
    block, settings = WIDTH * WIDTH, {"zero": zero, "data_size": RANKS, "precision": "bf16", "num_microbatches": chunks}
    expected = state_memory(NUMEL, **settings)
    # Gradients of the first microbatch come into being in this backward.
    started = expected.total - (expected.gradients if chunks == 1 and zero else 0.0)
    # The last block stays gathered for it. FSDP keeps the buffer of its last reduce-scatter.
    transient = (2 * block if zero == 3 else 0) + (4 * block if zero >= 2 and chunks > 1 else 0)
    gathered = gathered_bytes(2 * block, zero=zero)
    assert transient <= gathered + scattered_bytes(block, zero=zero, num_microbatches=chunks)
    assert held[zero, chunks][1] == pytest.approx(started + transient, rel=0.03)
