"""Bytes that a rank really holds, at every ZeRO level, against the formulas of the cost model."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import autopar
from autopar.cost_model.memory import gathered_bytes, state_memory
from tests.harness import run_ranks

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


def _storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor of this process uses."""
    found = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter) and not isinstance(value, FakeTensor) and value.device.type == "cpu":
            storage = value.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """What autograd keeps for backward, which has no Python object."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        super().__init__(self._pack, lambda value: value)

    def _pack(self, value: Tensor) -> Tensor:
        self.kept.append(value.detach())
        return value


def _held(zero: int, chunks: int) -> tuple[float, float]:
    """Bytes between steps, and at the start of the last backward of a step."""
    gc.collect()
    before = sum(_storages().values())
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
    gc.collect()
    resting = sum(_storages().values()) - before
    inside: list[float] = []
    engine = parallel.engine
    told = engine._before_backward
    saved = _Saved()
    with saved:

        def watch(last: bool) -> None:
            if last:
                gc.collect()
                inside.append(sum(_storages().values()) - before)
            saved.kept.clear()
            told(last)

        engine._before_backward = watch  # type: ignore[method-assign]
        optimizer.zero_grad(set_to_none=zero > 0)
        parallel.step(*mine)
    return resting, inside[0]


def _all_held() -> dict[tuple[int, int], tuple[float, float]]:
    return {case: _held(*case) for case in CASES}


@pytest.fixture(scope="module")
def held() -> dict[tuple[int, int], tuple[float, float]]:
    measured: dict[tuple[int, int], tuple[float, float]] = run_ranks(_all_held, RANKS)[0]
    return measured


@pytest.mark.parametrize(("zero", "chunks"), CASES)
def test_between_steps(zero: int, chunks: int, held: dict[tuple[int, int], tuple[float, float]]) -> None:
    # What is gathered for a step is given back after it, at every level.
    expected = 16 * NUMEL / (RANKS if zero else 1)
    assert held[zero, chunks][0] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("zero", "chunks"), CASES)
def test_inside_a_step(zero: int, chunks: int, held: dict[tuple[int, int], tuple[float, float]]) -> None:
    block, settings = WIDTH * WIDTH, {"zero": zero, "data_size": RANKS, "precision": "bf16", "num_microbatches": chunks}
    expected = state_memory(NUMEL, **settings)
    # Gradients of the first microbatch come into being in this backward.
    started = expected.total - (expected.gradients if chunks == 1 and zero else 0.0)
    # The last block stays gathered for it. FSDP keeps the buffer of its last reduce-scatter.
    transient = (2 * block if zero == 3 else 0) + (4 * block if zero >= 2 and chunks > 1 else 0)
    assert transient <= gathered_bytes(block, **settings)
    assert held[zero, chunks][1] == pytest.approx(started + transient, rel=0.03)
