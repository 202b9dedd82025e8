"""16-bit copies of parameters: made once a step, their gradients summed in float32, equal under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.harness import run_ranks

CHUNKS, ROWS, WORDS, WIDTH = 4, 16, 32, 24


class Tied(nn.Module):
    """An embedding that is also the head, and layers with biases and norms between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        scores = nn.functional.linear(x, self.words.weight)
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


class Casts(TorchDispatchMode):
    """Counts the float32 matrices that are cast to bfloat16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            shape = tuple(args[0].shape)
            self.count[shape] = self.count.get(shape, 0) + 1
        return func(*args, **kwargs)


def _batch() -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    return words[:, :-1], words[:, 1:]


def _parallel(ranks: int, *, precision: str = "bf16", chunks: int = CHUNKS, **settings: Any) -> Any:
    torch.manual_seed(0)
    single = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, "ep": 1, "zero": 0, "remat": "none"} | settings
    rows = _batch() if chunks == CHUNKS else tuple(part[: ROWS // CHUNKS] for part in _batch())
    return autopar.parallelize(
        Tied(), ranks, example_inputs=rows, precision=precision, num_microbatches=chunks, **single
    )


def _gradients(ranks: int, **settings: Any) -> dict[str, Tensor]:
    """After two steps without an update: the second is added to the first."""
    parallel = _parallel(ranks, **settings)
    for _ in range(2):
        parallel.step(*parallel.shard_batch(_batch()))
    found: dict[str, Tensor] = parallel.full_gradients()
    return found


def _summed_by_hand() -> dict[str, Tensor]:
    """The same from one call for each microbatch, added in float32."""
    parallel = _parallel(1, chunks=1)
    total: dict[str, Tensor] = {}
    for part in zip(*(value.chunk(CHUNKS) for value in _batch()), strict=True):
        for parameter in parallel.parameters():
            parameter.grad = None
        parallel.step(*part)
        for name, gradient in parallel.full_gradients().items():
            total[name] = total.get(name, 0.0) + 2 * gradient / CHUNKS
    return total


def _hooked() -> list[str]:
    parallel = _parallel(1)
    called: list[str] = []
    for name, parameter in parallel.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    parallel.step(*_batch())
    return called


def _plain_forward() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a step, and of a backward of one's own."""
    parallel = _parallel(1, chunks=1)
    rows = tuple(part[: ROWS // CHUNKS] for part in _batch())
    parallel.step(*rows)
    stepped = parallel.full_gradients()
    for parameter in parallel.parameters():
        parameter.grad = None
    parallel(*rows).backward()
    return stepped, parallel.full_gradients()


def _casts(remat: str) -> dict[tuple[int, ...], int]:
    parallel = _parallel(1, remat=remat)
    with Casts() as casts:
        parallel.step(*_batch())
    return casts.count


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Tensor]:
    found: dict[str, Tensor] = run_ranks(_summed_by_hand, 1)[0]
    return found


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def test_gradients_of_microbatches_are_added_in_float32(by_hand: dict[str, Tensor]) -> None:
    # Division by four is exact in any of the formats, so only the order of the sums is left to differ.
    assert _error(run_ranks(_gradients, 1, 1)[0], by_hand) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        *({"dp": 2, "zero": zero} for zero in range(4)),
        {"tp": 2},
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zb-h1"},
        {"dp": 2, "remat": "full"},
    ],
    ids=str,
)
def test_plans_agree(settings: dict[str, Any], by_hand: dict[str, Tensor]) -> None:
    # Of sums of 16-bit numbers in another order; float32 gradients of these are 0.9 % away.
    for found in run_ranks(_gradients, 2, 2, **settings):
        assert _error(found, by_hand) < 0.01


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_casts_a_parameter_once(remat: str) -> None:
    casts = run_ranks(_casts, 1, remat)[0]
    assert casts[WORDS, WIDTH] == 1
    assert casts[2 * WIDTH, WIDTH] == casts[WIDTH, 2 * WIDTH] == 2


def test_hooks_of_parameters_run_in_every_microbatch() -> None:
    called = run_ranks(_hooked, 1)[0]
    assert called.count("words.weight") == called.count("layers.1.3.weight") == CHUNKS


def test_plain_forward_reads_them_too() -> None:
    stepped, own = run_ranks(_plain_forward, 1)[0]
    assert _error(own, stepped) < 1e-6
