"""Experts however their gate is laid out and whatever it does, and however their router writes its choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers the grouped product that experts take on a CPU
from torch import Tensor, fx, nn

from autopar.ir.capture.capture import capture
from autopar.ir.gates import gate_function
from autopar.ir.graph import CapturedModel
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise
from tests.ir.models import assert_same_training

T, H, INNER, E, K = 12, 8, 6, 4, 2


class Experts(nn.Module):
    """Rows sorted by expert, two grouped products, and the way back. ``between`` is what lies between the products."""

    def __init__(self, between: Callable[[Tensor], Tensor], *, wide: int = 2 * INNER, flat: bool = False) -> None:
        super().__init__()
        self.between, self.flat = between, flat
        self.router = nn.Linear(H, E)
        self.up, self.up_bias = nn.Parameter(torch.randn(E, H, wide)), nn.Parameter(torch.randn(E, wide))
        self.down = nn.Parameter(torch.randn(E, INNER, H))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, index = scores.topk(K, -1)
        rows = x.reshape(-1, H)
        if self.flat:  # the weights are looked up again in rows of tokens, the indices are not
            weights = scores.reshape(-1, E).gather(-1, index.reshape(-1, K))
            weights = weights / weights.sum(-1, keepdim=True)
        chosen, order = index.reshape(-1).sort()
        ends = torch.histc(chosen.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        up = product(rows[order // K], self.up, ends) + self.up_bias[chosen]
        down = product(self.between(up), self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return down[inverse].view(-1, K, H).sum(1).square().mean()


def clamped(up: Tensor) -> Tensor:
    gate, value = up[..., ::2], up[..., 1::2]
    gate, value = gate.clamp(max=0.5), value.clamp(-0.5, 0.5)
    return (value + 1) * (gate * torch.sigmoid(gate * 1.702))


def value_first(up: Tensor) -> Tensor:
    value, gate = up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * value


def _captured(model: nn.Module, *inputs: Any) -> tuple[CapturedModel, fx.Node]:
    captured = normalise(capture(model, inputs))
    assert_same_training(captured, model, inputs)
    (moe,) = (node for node in captured.graph.nodes if node.target is composite.moe)
    return captured, moe


@pytest.mark.parametrize(
    ("between", "wide", "activation", "gated", "interleaved"),
    [
        (lambda up: F.silu(up[..., :INNER]) * up[..., INNER:], 2 * INNER, "silu", True, False),
        (lambda up: up[..., 1::2] * F.gelu(up[..., ::2]), 2 * INNER, "gelu", True, True),
        (value_first, 2 * INNER, "mul(gelu(value, approximate='tanh'), gate)", True, False),
        (
            clamped,
            2 * INNER,
            "mul(add(clamp(value, -0.5, 0.5), 1), "
            "mul(clamp(gate, None, 0.5), sigmoid(mul(clamp(gate, None, 0.5), 1.702))))",
            True,
            True,
        ),
        (F.relu, INNER, "relu", False, False),
        (lambda up: F.relu(up).square(), INNER, None, False, False),
    ],
)
def test_gates(
    between: Callable[[Tensor], Tensor], wide: int, activation: str | None, gated: bool, interleaved: bool
) -> None:
    torch.manual_seed(0)
    _, node = _captured(Experts(between, wide=wide), torch.randn(3, T // 3, H))
    options = node.kwargs
    assert (options["gated"], options.get("interleaved", False)) == (gated, interleaved)
    assert options["activation"] == (activation or options["activation"])
    # Interleaved gates leave the inner width in pieces that are alike.
    assert ("f" in rule_for(node).shardable()) == (interleaved or not gated)


@pytest.mark.parametrize("flat", [False, True])
def test_indices_and_weights_of_different_shape(flat: bool) -> None:
    torch.manual_seed(0)
    _, node = _captured(Experts(value_first, flat=flat), torch.randn(3, T // 3, H))
    shapes = [tuple(operand.meta["val"].shape) for operand in node.args[:3]]  # type: ignore[union-attr]
    assert shapes == [(3, 4, H), (3, 4, K), (3, 4, K)]


def test_an_expression_means_what_it_says() -> None:
    gate, value = torch.randn(2, 5)
    text = "mul(add(clamp(value, -7.0, 7.0), 1), mul(gate, sigmoid(mul(gate, 1.702))))"
    torch.testing.assert_close(
        gate_function(text)({"gate": gate, "value": value}),
        (value.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate),
    )
