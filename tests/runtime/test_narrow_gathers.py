"""Weights that ZeRO gathers in 8 bits: every number of a step is what it is where they are gathered wide."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.errors import PlanMismatch
from autopar.ir.ops.narrow_tensor import NarrowTensor
from autopar.ir.primitives.collective_counter import CollectiveCounter
from examples.gpt import GPT, Config
from tests.harness import run_ranks

# Products of a block, of which there are two.
_OF_BLOCK = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    # Rows of weights that three ranks cannot divide.
    return GPT(Config(width=32, num_layers=2, num_heads=4, num_kv_heads=4, hidden=80, vocabulary=32))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, 32, (12, 8), generator=generator) for _ in range(2))
    return first, second


def train(ranks: int, zero: int, how: dict[str, Any]) -> tuple[list[Tensor], list[float], int, int]:
    """Parameters after two steps, losses, bytes that a step gathers, and the weights that are gathered in 8 bits."""
    options = {"num_microbatches": 2, "precision": "fp8-tensor", "zero": zero, **how}
    parallel = autopar.parallelize(model(), ranks, example_inputs=batch(), **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        with CollectiveCounter() as counter:
            losses.append(float(parallel.step(*parallel.shard_batch(batch()))))
        optimizer.step()
        optimizer.zero_grad()
    gathered = sum(one.payload_bytes for one in counter.select("all_gather"))
    engines = [stage.zero for stage in parallel.engine.local]
    narrow = sum(len(own.narrow.names) for own in engines if own is not None and own.narrow is not None)
    return list(parallel.full_state_dict().values()), losses, gathered, narrow


@pytest.mark.parametrize(
    ("ranks", "zero", "how"),
    [
        (3, 3, {"dp": 3}),
        pytest.param(3, 1, {"dp": 3}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"dp": 2}, marks=pytest.mark.slow),
        pytest.param(2, 3, {"dp": 2, "remat": "full"}, marks=pytest.mark.slow),
        pytest.param(4, 3, {"dp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"dp": 2, "pp": 2, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(4, 3, {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param(2, 3, {"dp": 2, "compile": True}, marks=pytest.mark.slow),
    ],
)
def test_they_train_as_weights_that_are_whole(ranks: int, zero: int, how: dict[str, Any]) -> None:
    values, losses, _, narrow = run_ranks(train, ranks, ranks, zero, how)[0]
    wanted, wanted_losses, _, none = run_ranks(train, ranks, ranks, 0, how)[0]
    assert narrow == 2 * _OF_BLOCK // how.get("pp", 1) and none == 0
    assert losses == wanted_losses
    for own, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-7)


def evaluate(zero: int) -> list[float]:
    """Losses in eval mode and of a plain forward with a gradient, before and after a step."""
    parallel = autopar.parallelize(
        model(), 2, example_inputs=batch(), num_microbatches=1, precision="fp8-tensor", dp=2, zero=zero
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    found, inputs = [], parallel.shard_batch(batch())
    for _ in range(2):
        parallel.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        parallel.eval()
        found.append(float(parallel.loss(*inputs)))
        parallel.train()
        loss = parallel(*inputs)
        with torch.no_grad():
            parallel(*inputs)  # after which weights are gathered again for the backward of the first
        loss.backward()
        found += [float(loss.detach()), *(float(grad.abs().sum()) for grad in parallel.full_gradients().values())]
        optimizer.zero_grad()
    deepcopy(dict(parallel.state_dict()))
    return found


def test_they_evaluate_as_weights_that_are_whole() -> None:
    assert run_ranks(evaluate, 2, 3)[0] == pytest.approx(run_ranks(evaluate, 2, 0)[0], rel=1e-6)


class Clipped(nn.Module):
    """Its weights are clipped where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            weight = layer.weight if self.training else layer.weight.clamp(-0.1, 0.1)
            x = x + nn.functional.linear(x, weight).relu()
        return self.last(x).square().mean()


def evaluate_clipped() -> str:
    x = torch.randn(16, 16)
    parallel = autopar.parallelize(
        Clipped(), 2, example_inputs=(x,), precision="fp8-tensor", dp=2, zero=3, num_microbatches=1
    )
    parallel.step(*parallel.shard_batch((x,)))
    parallel.eval()
    with pytest.raises(PlanMismatch) as raised:
        parallel.loss(*parallel.shard_batch((x,)))
    return str(raised.value)


def test_a_mode_that_reads_them_otherwise_is_refused_by_name() -> None:
    assert "in eval mode Clipped reads layers.0.weight otherwise" in run_ranks(evaluate_clipped, 2)[0]


def test_other_ops_of_them_are_refused() -> None:
    values = torch.zeros(3, 2, dtype=torch.float8_e4m3fn)
    narrow = NarrowTensor(values, torch.ones(()), torch.bfloat16)
    assert (narrow.t().shape, narrow.t().dtype, narrow.t().floats.stride()) == ((2, 3), torch.bfloat16, (1, 2))
    with pytest.raises(NotImplementedError, match=r"add.*\(3, 2\).*8-bit floats"):
        narrow + 1


def _gathered(how: dict[str, Any]) -> int:
    return run_ranks(train, 2, 2, 3, how)[0][2]


def test_half_the_bytes_are_gathered() -> None:
    eight, sixteen = _gathered({"dp": 2}), _gathered({"dp": 2, "precision": "bf16"})
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 80)  # of the layers in 8 bits
    assert sixteen - eight == 2 * 2 * weights, "forward and backward of two microbatches"
