from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.ir.building import shape_of
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.ops import composite
from autopar.passes.normalise import normalise
from tests.ir.models import assert_same_training

B, H, S, D = 3, 4, 10, 8

ROWS, COLUMNS = torch.arange(S)[:, None], torch.arange(S)[None, :]


class Attention(nn.Module):
    """One attention over learned projections; ``attend(q, k, v, x)`` says how."""

    def __init__(self, attend: Callable[..., Tensor], kv_heads: int = H) -> None:
        super().__init__()
        self.attend = attend
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(D, (H + 2 * kv_heads) * D)
        self.bias = nn.Parameter(torch.randn(H, S, S))
        self.sinks = nn.Parameter(torch.randn(H))
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        sizes = [H * D, self.kv_heads * D, self.kv_heads * D]
        parts = (p.view(B, S, -1, D).transpose(1, 2) for p in self.qkv(x).split(sizes, -1))
        return self.attend(self, *parts, seen).square().sum()  # type: ignore[no-any-return]


def normal(attend: Callable[..., Tensor], **options: Any) -> tuple[CapturedModel, fx.Node]:
    torch.manual_seed(0)
    model = Attention(attend, **options)
    inputs = (torch.randn(B, S, D), torch.arange(S) < torch.tensor([[10], [4], [7]]))
    captured = normalise(capture(model, inputs))
    assert_same_training(captured, model, inputs)
    calls = [node for node in captured.graph.nodes if node.target is composite.attention]
    assert len(calls) == 1
    return captured, calls[0]


def described(node: fx.Node) -> tuple[Any, ...]:
    """(kind, window, shape of the mask operand)"""
    mask = shape_of(node.args[3]) if len(node.args) > 3 else None  # type: ignore[arg-type]
    return node.kwargs["kind"], node.kwargs.get("window"), mask


def masked(mask: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda self, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, mask(seen))


def additive(seen: Tensor) -> Tensor:
    return torch.zeros(S, S).masked_fill(~seen, torch.finfo(torch.float32).min)


CAUSAL = COLUMNS <= ROWS


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda seen: torch.ones(S, S, dtype=torch.bool).expand(B, 1, S, S), ("full", None, None)),
        (lambda seen: torch.arange(S)[None, :] <= torch.arange(S)[:, None], ("causal", None, None)),
        (lambda seen: CAUSAL & (COLUMNS > ROWS - 3), ("sliding", 3, None)),
        (lambda seen: CAUSAL & (COLUMNS > ROWS - 99), ("causal", None, None)),
        (lambda seen: additive(CAUSAL), ("causal", None, None)),
        (lambda seen: additive(CAUSAL)[None, None].expand(B, H, S, S) + 0.0, ("causal", None, None)),
        (lambda seen: CAUSAL | (COLUMNS < 4), ("mask", None, (1, 1, S, S))),
        (lambda seen: (CAUSAL | (COLUMNS < 4)).expand(B, H, S, S), ("mask", None, (1, 1, S, S))),
        (lambda seen: seen[:, None, None, :], ("mask", None, (B, 1, 1, S))),
        (lambda seen: seen[:, None, None, :].expand(B, 1, S, S), ("mask", None, (B, 1, 1, S))),
        (lambda seen: CAUSAL & seen[:, None, None, :], ("causal", None, (B, 1, 1, S))),
        (lambda seen: CAUSAL & (COLUMNS > ROWS - 3) & seen[:, None, None, :], ("sliding", 3, (B, 1, 1, S))),
    ],
)
def test_what_a_mask_means(mask: Callable[[Tensor], Tensor], expected: tuple[Any, ...]) -> None:
    assert described(normal(masked(mask))[1]) == expected


def test_a_learned_bias_stays_and_the_condition_on_it_becomes_a_kind() -> None:
    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        bias = torch.where(CAUSAL, self.bias, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, k, v, bias[None].expand(B, H, S, S))

    assert described(normal(attend)[1]) == ("causal", None, (1, H, S, S))


def test_a_bias_with_a_padding_mask_is_one_mask() -> None:
    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        padding = torch.where(seen[:, None, None, :], 0.0, -1e9)
        return F.scaled_dot_product_attention(q, k, v, self.bias[None] + padding)

    assert described(normal(attend)[1]) == ("mask", None, (B, H, S, S))


@pytest.mark.parametrize("last", [True, False])
def test_sinks_are_operands_of_the_attention(last: bool) -> None:
    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * 0.25 + additive(CAUSAL)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
        if last:
            scores = torch.cat([scores, sinks], dim=-1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
            return scores.softmax(-1)[..., :-1] @ v
        return torch.cat([sinks, scores], dim=3).softmax(3)[..., 1:] @ v

    captured, node = normal(attend)
    assert (node.kwargs["kind"], node.args[3]) == ("causal", None)
    assert captured.parameters[node.args[4].name].name == "sinks"  # type: ignore[union-attr]


@pytest.mark.parametrize("spelling", ["enable_gqa", "repeat_interleave", "expand"])
def test_grouped_heads(spelling: str) -> None:
    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        if spelling == "enable_gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if spelling == "repeat_interleave":
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        else:
            k, v = (t[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    captured, node = normal(attend, kv_heads=2)
    assert [shape_of(a)[1] for a in node.args] == [H, 2, 2]  # type: ignore[arg-type]
    assert described(node) == ("causal", None, None)
    assert not any("repeat" in str(n.target) or "expand" in str(n.target) for n in captured.graph.nodes)


def eager(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * D**-0.5
    scores = scores.masked_fill(self.tril[:, :, :S, :S] == 0, float("-inf"))  # type: ignore[index]
    return F.dropout(F.softmax(scores, dim=-1), 0.0) @ v


def eager_divided(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) / 2 + additive(CAUSAL) + self.bias
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def eager_transposed(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.where(seen[:, None, None, :], q @ k.permute(0, 1, 3, 2), -1e9)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "expected", "scale"),
    [
        (eager, ("causal", None, None), D**-0.5),
        (eager_divided, ("causal", None, (1, H, S, S)), 0.5),
        (eager_transposed, ("mask", None, (B, 1, 1, S)), 1.0),
    ],
)
def test_attention_spelt_out(attend: Callable[..., Tensor], expected: tuple[Any, ...], scale: float) -> None:
    node = normal(attend)[1]
    assert described(node) == expected
    assert node.kwargs["scale"] == pytest.approx(scale)


def test_scores_that_are_returned_are_kept() -> None:
    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        weights = F.softmax(q @ k.transpose(-2, -1), -1)
        return weights @ v * weights.sum()

    model = Attention(attend)
    captured = normalise(capture(model, (torch.randn(B, S, D), torch.ones(B, S, dtype=torch.bool))))
    assert not any(node.target is composite.attention for node in captured.graph.nodes)


def test_attention_without_heads() -> None:
    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (t[:, 0] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, seen[:, None, :])

    assert described(normal(attend)[1]) == ("mask", None, (B, 1, 1, S))
