"""Attention over merged batch and heads, as older code spells it, is attention over both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.ops import composite
from autopar.passes.normalise import normalise
from tests.ir.models import assert_same_training

aten = torch.ops.aten
B, S, HEADS, D = 3, 6, 4, 5
H = HEADS * D


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.positions = nn.Parameter(torch.randn(2 * S, H))
        self.bias = nn.Parameter(torch.randn(HEADS, S, S))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(self, self.q(x), self.k(x), self.v(x))).square().mean()


def _merged(x: Tensor) -> Tensor:
    """(B, S, H) -> (B * HEADS, S, D)."""
    return x.view(B, S, HEADS, D).transpose(1, 2).reshape(B * HEADS, S, D)


def _back(x: Tensor) -> Tensor:
    return x.view(B, HEADS, S, D).transpose(1, 2).reshape(B, S, H)


def additive(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias by head and key, added by the product itself, and a causal mask."""
    slopes = torch.arange(1, HEADS + 1)[:, None, None] * torch.arange(S)[None, None, :]
    bias = (slopes * torch.ones(B, 1, 1, 1)).reshape(B * HEADS, 1, S)
    scores = torch.baddbmm(bias, _merged(q), _merged(k).transpose(1, 2), beta=1.0, alpha=1 / math.sqrt(D))
    unseen = torch.ones(S, S, dtype=torch.bool).triu(1)
    weights = scores.view(B, HEADS, S, S).masked_fill(unseen, torch.finfo(torch.float32).min).softmax(-1)
    return _back(torch.bmm(weights.view(B * HEADS, S, S), _merged(v)))


def disentangled(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of contents and of contents with relative positions, which all rows of the batch share."""
    q, k = _merged(q), _merged(k)
    scores = torch.bmm(q, k.transpose(-1, -2) / math.sqrt(3 * D))
    positions = m.k(m.positions).view(1, 2 * S, HEADS, D).permute(0, 2, 1, 3).reshape(-1, 2 * S, D).repeat(B, 1, 1)
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :] + S
    to_positions = torch.bmm(q, positions.transpose(-1, -2))
    scores = scores + to_positions.gather(-1, distance[None].expand(B * HEADS, S, S)) / math.sqrt(3 * D)
    weights = scores.view(-1, HEADS, S, S).softmax(-1)
    return _back(torch.bmm(weights.view(-1, S, S), _merged(v)))


def length_first(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequence in front, batch and heads merged in the second dimension."""
    q, k, v = (x.transpose(0, 1).contiguous().view(S, B * HEADS, D).transpose(0, 1) for x in (q * D**-0.5, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).softmax(2)
    return torch.bmm(weights, v).transpose(0, 1).contiguous().view(S, B, H).transpose(0, 1)


def bounded(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores that are viewed apart to be masked, kept from falling below the smallest number, and merged again."""
    smallest = torch.finfo(torch.float32).min
    scores = torch.bmm(_merged(q), _merged(k).transpose(1, 2)).view(B, HEADS, S, S)
    scores = torch.max(scores + torch.full((S, S), smallest).triu(1), torch.tensor(smallest))
    return _back(torch.bmm(torch.softmax(scores.view(B * HEADS, S, S), -1), _merged(v)))


def learned(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A learned bias for each head, repeated for every row of the batch."""
    scores = torch.bmm(_merged(q), _merged(k).transpose(1, 2)) + m.bias.repeat(B, 1, 1)
    return _back(torch.bmm(torch.softmax(scores, dim=2), _merged(v)))


def _normal(attend: Callable[..., Tensor], **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model, x = Layer(attend), torch.randn(B, S, H)
    captured = normalise(capture(model, (x,)))
    assert_same_training(captured, model, (x,))
    return [node.target for node in captured.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("attend", "products"), [(additive, 0), (disentangled, 1), (length_first, 0), (learned, 0), (bounded, 0)]
)
def test_products_over_batch_and_heads_are_attention(attend: Callable[..., Tensor], products: int) -> None:
    left = _normal(attend)
    assert left.count(composite.attention) == 1
    assert left.count(aten.matmul.default) == products
    assert not {aten.bmm.default, aten.baddbmm.default, aten.softmax.int} & set(left)


def test_a_product_over_the_batch_alone_is_left() -> None:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).sigmoid(), v)

    assert _normal(attend).count(aten.bmm.default) == 2
