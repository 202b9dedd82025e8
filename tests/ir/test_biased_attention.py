"""Attention whose bias needs a gradient, beside torch's own in plain ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.ops import biased_attention
from autopar.ir.ops.biased_attention import masked_attention
from autopar.ir.ops.composite import attention

BATCH, HEADS, QUERIES, KEYS, WIDTH, SCALE = 2, 3, 7, 9, 4, 0.4


def gradients(attend: object, bias: Tensor, given: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (*given, bias)]
    q, k, v, mask = leaves
    assert callable(attend)
    out = attend(q, k, v, mask)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("tile", [4, 1024])
@pytest.mark.parametrize(
    "shape",
    [
        (BATCH, HEADS, QUERIES, KEYS),
        (1, HEADS, QUERIES, KEYS),
        (BATCH, 1, 1, KEYS),
        (QUERIES, KEYS),
        (1, 1, QUERIES, 1),
    ],
)
def test_gradients_equal_those_in_plain_ops(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], tile: int) -> None:
    monkeypatch.setattr(biased_attention, "TILE", tile)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    given = [drawn(BATCH, HEADS, size, WIDTH) for size in (QUERIES, KEYS, KEYS)]
    bias = drawn(*shape)
    if shape[-2:] == (QUERIES, KEYS):
        bias[..., -2:] = float("-inf")
    ours = gradients(lambda q, k, v, m: masked_attention(q, k, v, m, scale=SCALE, dropout_p=0.0), bias, given)
    plain = gradients(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=SCALE), bias, given)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tile", [4, 1024])
@pytest.mark.parametrize("shape", [(BATCH, HEADS, KEYS, KEYS), (1, HEADS, 1, KEYS)])
def test_causal_with_a_bias(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], tile: int) -> None:
    monkeypatch.setattr(biased_attention, "TILE", tile)
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(BATCH, HEADS, KEYS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3)]
    bias = torch.randn(shape, dtype=torch.float64, generator=generator)
    hidden = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask.masked_fill(hidden, float("-inf")), scale=SCALE)

    ours = gradients(lambda q, k, v, m: attention(q, k, v, m, kind="causal", scale=SCALE), bias, given)
    for one, other in zip(ours, gradients(plain, bias, given), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("additive", [False, True])
def test_causal_with_padding_makes_no_mask_of_all_pairs(additive: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(BATCH, HEADS, KEYS, WIDTH, generator=generator, requires_grad=True) for _ in range(3))
    seen = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    seen[1, ..., :2] = False  # queries that see nothing
    mask = torch.where(seen, 0.0, float("-inf")) if additive else seen
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = attention(q, k, v, mask, kind="causal", scale=SCALE)
    assert max(x.numel() for x in kept) == q.numel()
    whole = seen & torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, whole, scale=SCALE)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_heads_that_are_last_in_memory() -> None:
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(BATCH, HEADS, WIDTH, KEYS, generator=generator).mT for _ in range(3)]
    bias = torch.randn(KEYS, KEYS, HEADS, generator=generator).permute(2, 0, 1)
    ours = gradients(
        lambda q, k, v, m: masked_attention(q.mT.contiguous().mT, k, v, m, scale=SCALE, dropout_p=0.0), bias, given
    )
    plain = gradients(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=SCALE), bias, given)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_scores_are_not_kept() -> None:
    q, k, v = (torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 64, 64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        masked_attention(q, k, v, bias, scale=1.0, dropout_p=0.0)
    assert sum(x.numel() == bias.numel() for x in kept) == 1, "the bias itself"


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    out = masked_attention(q, k, v, torch.randn(3, 3, requires_grad=True), scale=1.0, dropout_p=0.0)
    with pytest.raises(RuntimeError, match="has one derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
