from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.ops import composite
from autopar.ir.ops.expert_ffn import ACTIVATIONS


def dense_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return ((q @ k.transpose(-2, -1)) * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v


@settings(max_examples=40)
@given(
    length=st.integers(1, 20),
    window=st.integers(1, 24),
    kind=st.sampled_from(["full", "causal", "sliding"]),
    groups=st.sampled_from([1, 2, 4]),
    padded=st.booleans(),
    values=st.sampled_from([4, 8, 12]),
)
def test_attention_by_kind(
    length: int, window: int, kind: composite.AttentionKind, groups: int, padded: bool, values: int
) -> None:
    torch.manual_seed(length)
    q = torch.randn(2, 4, length, 8, requires_grad=True)
    k, v = (torch.randn(2, groups, length, size, requires_grad=True) for size in (8, values))
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if kind != "full":
        seen = columns <= rows
    if kind == "sliding":
        seen = seen & (columns > rows - window)
    mask = None
    if padded:
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        if kind != "sliding":
            mask[0, ..., 1:] = columns[1:] % 3 != 0  # the first key is seen, so that no row is empty
        seen = seen & mask
    out = composite.attention(q, k, v, mask, kind=kind, window=window if kind == "sliding" else None, scale=0.3)
    expected = dense_attention(q, k, v, seen, 0.3)
    torch.testing.assert_close(out, expected)
    for left, right in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "length", "window", "masked"),
    [
        ("full", 6, None, False),
        ("causal", 6, None, False),
        ("sliding", 6, 3, False),
        ("sliding", 12, 3, False),
        ("causal", 6, None, True),
        ("mask", 6, None, True),
    ],
)
def test_sinks_are_a_key_that_all_queries_see(
    kind: composite.AttentionKind, length: int, window: int, masked: bool
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, requires_grad=True)
    seen = torch.ones(length, length, dtype=torch.bool)
    if kind in ("causal", "sliding"):
        seen = seen.tril()
    if kind == "sliding":
        seen = seen.triu(1 - window)
    mask = torch.randn(2, 1, length, length) if masked else None
    out = composite.attention(q, k, v, mask, sinks, kind=kind, window=window, scale=0.3)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ wide_k.transpose(-2, -1) * 0.3 + (0.0 if mask is None else mask)
    scores = torch.cat(
        [scores.masked_fill(~seen, float("-inf")), sinks[None, :, None, None].expand(2, 4, length, 1)], -1
    )
    expected = scores.softmax(-1)[..., :-1] @ wide_v
    torch.testing.assert_close(out, expected)
    for left, right in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v, sinks)),
        torch.autograd.grad(expected.square().sum(), (q, k, v, sinks)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_a_bias_under_a_causal_kind() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    out = composite.attention(q, k, v, bias, kind="causal", scale=1.0)
    scores = (q @ k.transpose(-2, -1) + bias).masked_fill(~torch.ones(6, 6).tril().bool(), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    out.sum().backward()
    assert bias.grad is not None and not bias.grad.isnan().any()


def test_sliding_attention_makes_no_square() -> None:
    class Largest(torch.overrides.TorchFunctionMode):
        numel = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.numel = max(self.numel, result.numel())
            return result

    q, k, v = torch.randn(3, 1, 1, 512, 4)
    with Largest() as largest:
        composite.attention(q, k, v, kind="sliding", window=16, scale=1.0)
    assert largest.numel <= 512 * 16


def test_narrow_values_make_no_square() -> None:
    q, k, v = (torch.randn(1, 2, 256, size, requires_grad=True) for size in (24, 24, 16))
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        composite.attention(q, k, v, kind="causal", scale=1.0)
    assert max(saved) <= 2 * 256 * 24


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_keeps_leading_dimensions(reduction: composite.Reduction) -> None:
    logits, target = torch.randn(2, 3, 7), torch.tensor([[1, -100, 3], [0, 6, -100]])
    loss = composite.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
    expected = F.cross_entropy(logits.transpose(1, 2), target, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_cross_entropy_widens() -> None:
    logits, target = torch.randn(4, 7).bfloat16(), torch.arange(4)
    assert torch.equal(composite.cross_entropy(logits, target), F.cross_entropy(logits.float(), target))


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 6),
    experts=st.integers(1, 4),
    gated=st.booleans(),
    biased=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_moe_equals_every_expert_on_every_token(
    tokens: int, experts: int, gated: bool, biased: bool, activation: str
) -> None:
    torch.manual_seed(tokens)
    hidden, inner, top_k = 5, 6, min(2, experts)
    wide = 2 * inner if gated else inner
    x = torch.randn(2, tokens, hidden, requires_grad=True)
    w_up = torch.randn(experts, wide, hidden, requires_grad=True)
    w_down = torch.randn(experts, hidden, inner, requires_grad=True)
    b_up, b_down = (torch.randn(experts, n, requires_grad=True) if biased else None for n in (wide, hidden))
    weight, index = torch.rand(2, tokens, experts).topk(top_k)
    weight.requires_grad_()
    out = composite.moe(x, index, weight, w_up, w_down, b_up, b_down, activation=activation, gated=gated)
    up = torch.einsum("bth,enh->bten", x, w_up) + (0 if b_up is None else b_up)
    act = ACTIVATIONS[activation]
    if gated:
        gate, value = up.chunk(2, -1)
        up = act(gate) * value
    else:
        up = act(up)
    down = torch.einsum("btei,ehi->bteh", up, w_down) + (0 if b_down is None else b_down)
    chosen = down.gather(2, index[..., None].expand(-1, -1, -1, hidden))
    expected = (chosen * weight[..., None]).sum(2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    leaves = [t for t in (x, weight, w_up, w_down, b_up, b_down) if t is not None]
    for left, right in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


@settings(max_examples=20)
@given(seed=st.integers(0, 999), factor=st.sampled_from([0.1, 0.5, 1.0, 1.3, 4.0]))
def test_a_full_expert_passes_later_tokens_by(seed: int, factor: float) -> None:
    torch.manual_seed(seed)
    num_experts, top_k, tokens = 3, 2, (2, 5)
    x, weight = torch.randn(*tokens, 4), torch.rand(*tokens, top_k)
    index = torch.randint(0, num_experts, (*tokens, top_k))
    w_up, w_down = torch.randn(num_experts, 6, 4), torch.randn(num_experts, 4, 6)
    options = {"activation": "relu", "gated": False}
    limited = composite.moe(x, index, weight, w_up, w_down, **options, capacity_factor=factor)
    taken, capacity = [0] * num_experts, math.ceil(factor * index.numel() / num_experts)
    admitted = weight.clone().view(-1)
    for row, expert in enumerate(index.flatten().tolist()):
        admitted[row] *= taken[expert] < capacity
        taken[expert] += 1
    torch.testing.assert_close(limited, composite.moe(x, index, admitted.view_as(weight), w_up, w_down, **options))
