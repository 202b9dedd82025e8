"""Ops that multiply matrices: products, attention, convolutions, recurrent layers, experts, Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import composite
from tests.ir.rules.proved.operands import Case, c, case, ints, r

aten = torch.ops.aten

MATMUL = [
    case("d0 d1 k n + +", aten.linear.default, r(2, 4, 6), r(8, 6)),
    case("d0 k n", aten.linear.default, r(4, 6), r(8, 6), r(8)),
    case("k n + +", aten.linear.default, r(6), r(8, 6)),
    case("d0 d1 k n + +", composite.columns_linear, r(2, 4, 6), r(6, 8)),
    case("d0 k n", composite.columns_linear, r(4, 6), r(6, 8), r(8)),
    case("d0! d1! k! n!", composite.scaled_linear, r(2, 4, 32), r(64, 32), recipe="fp8-tensor"),
    case("d0! k! n!", composite.scaled_linear, r(4, 32), r(32, 64), r(64), recipe="fp8-row", by_columns=True),
    case("d0! d1! k! n!", composite.scaled_linear, r(2, 4, 32), r(64, 32), recipe="fp8-block"),
    case("m k n + +", aten.mm.default, r(4, 6), r(6, 8)),
    case("b0 m k n + +", aten.bmm.default, r(2, 4, 6), r(2, 6, 8)),
    case("b0 b1 m k n + +", aten.matmul.default, r(2, 1, 4, 6), r(4, 6, 8)),
    case("m k + +", aten.matmul.default, r(4, 6), r(6)),
    case("k b0 n + +", aten.matmul.default, r(6), r(2, 6, 4)),
    case("k + +", aten.dot.default, r(6), r(6)),
    case("n m k", aten.addmm.default, r(8), r(4, 6), r(6, 8), beta=0.5, alpha=2.0),
    case("b0 m n k", aten.baddbmm.default, r(2, 4, 8), r(2, 4, 6), r(2, 6, 8)),
    case("m k", aten.addmv.default, r(4), r(4, 6), r(6)),
    case("m n + +", aten.outer.default, r(4), r(6)),
    case("b i j k + +", aten.einsum.default, "bij,bjk->bik", [r(2, 4, 6), r(2, 6, 8)]),
    case("b h + + +", aten.einsum.default, "bh,h,b", [r(2, 4), r(4), r(2)]),
]


def attention_case(
    expected: str, heads: int, groups: int, mask: Tensor | None = None, sinks: Tensor | None = None, **options: Any
) -> Case:
    q, k, v = r(2, heads, 4, 6), r(2, groups, 4, 6), r(2, groups, 4, 2)
    return case(expected, composite.attention, q, k, v, mask, sinks, scale=0.4, **options)


ATTENTION = [
    attention_case("b h s", 4, 4, kind="full"),
    attention_case("b h s", 4, 2, kind="full"),
    attention_case("b g s", 4, 1, kind="full"),
    attention_case("b h s!", 4, 2, kind="causal"),
    attention_case("b h s!", 4, 2, kind="sliding", window=2),
    attention_case("b h s", 4, 2, r(2, 1, 4, 4), kind="mask"),
    attention_case("b h s", 4, 4, r(4, 4, 4), kind="mask"),
    attention_case("b h s", 4, 2, r(2, 4, 1, 4), kind="mask"),
    attention_case("b h s!", 4, 2, r(2, 1, 1, 4), kind="causal"),
    attention_case("b h s!", 4, 2, None, r(4), kind="causal"),
    attention_case("b h s", 4, 2, r(2, 1, 1, 4), r(4), kind="mask"),
    case("b h s", aten.scaled_dot_product_attention.default, r(2, 4, 4, 6), r(2, 4, 8, 6), r(2, 4, 8, 6), r(4, 8)),
]

CONV = [
    case("b c o + +", aten.conv2d.default, r(2, 4, 6, 6), r(6, 4, 3, 3), None, [1, 1], [1, 1]),
    case("b c o", aten.conv2d.default, r(2, 4, 6, 6), r(6, 4, 3, 3), r(6), [2, 2], [1, 1]),
    case("b y0 y1 c o", aten.conv2d.default, r(2, 4, 8, 8), r(6, 4, 2, 2), r(6), [2, 2]),
    case("b y0 y1 c o + +", aten.conv2d.default, r(2, 4, 4, 4), r(6, 4, 1, 1)),
    case("b g + +", aten.conv2d.default, r(2, 4, 6, 6), r(8, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 2),
    case("b g", aten.conv1d.default, r(2, 4, 6), r(4, 1, 3), r(4), [1], [1], [1], 4),
    case("b c o", aten.conv1d.padding, r(2, 4, 6), r(6, 4, 3), r(6), [1], "same"),
    case("b c o", aten.conv_transpose2d.input, r(2, 4, 3, 3), r(4, 6, 2, 2), r(6), [2, 2]),
    case("b g", aten.conv_transpose2d.input, r(2, 4, 3, 3), r(4, 3, 2, 2), r(6), [2, 2], [0, 0], [0, 0], 2),
    case("b c o", aten.convolution.default, r(2, 4, 6), r(6, 4, 3), r(6), [1], [0], [1], False, [0], 1),
    case("b c", aten.max_pool2d.default, r(2, 4, 6, 6), [3, 3], [2, 2], [1, 1]),
    case("b c", aten.max_pool2d_with_indices.default, r(2, 4, 6, 6), [2, 2]),
    case("b c +", aten.avg_pool2d.default, r(2, 4, 6, 6), [2, 2]),
    case("b c +", aten.adaptive_avg_pool2d.default, r(2, 4, 6, 6), [1, 1]),
    case("b c +", aten.upsample_bilinear2d.vec, r(2, 4, 3, 3), [6, 6], False, None),
    case("d0 c y x +", aten.pixel_shuffle.default, r(2, 8, 4, 6), 2),
    case("d0 c y x +", aten.pixel_unshuffle.default, r(2, 2, 4, 8), 2),
]


def recurrent_case(kind: str, layers: int = 1, *, both: bool = False, first: bool = True, projected: int = 0) -> Case:
    """Six samples of five steps and width 3 through layers of width 4."""
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    directions, out = 2 if both else 1, projected or 4
    params = []
    for layer in range(layers):
        for _ in range(directions):
            params += [r(gates * 4, directions * out if layer else 3), r(gates * 4, out), r(gates * 4), r(gates * 4)]
            params += [r(projected, 4)] if projected else []
    h, c = r(layers * directions, 6, out), r(layers * directions, 6, 4)
    x = r(6, 5, 3) if first else r(5, 6, 3)
    options = (True, layers, 0.0, True, both, first)
    return case("b", getattr(aten, kind).input, x, [h, c] if kind == "lstm" else h, params, *options)


RECURRENT = [
    recurrent_case("lstm"),
    recurrent_case("lstm", 2, both=True, first=False),
    recurrent_case("lstm", 2, projected=2),
    recurrent_case("gru", 2, both=True),
    recurrent_case("rnn_tanh", 2, first=False),
    recurrent_case("rnn_relu"),
    case(
        "",
        aten.rnn_tanh.data,
        r(5, 3),
        torch.tensor([3, 2]),
        r(1, 3, 4),
        [r(4, 3), r(4, 4)],
        False,
        1,
        0.0,
        True,
        False,
    ),
    case("b", aten.lstm_cell.default, r(6, 3), [r(6, 4), r(6, 4)], r(16, 3), r(16, 4), r(16), r(16)),
    case("b", aten.gru_cell.default, r(6, 3), r(6, 4), r(12, 3), r(12, 4)),
    case("b", aten.rnn_tanh_cell.default, r(6, 3), r(6, 4), r(4, 3), r(4, 4), r(4), r(4)),
    case("b", aten.rnn_relu_cell.default, r(6, 3), r(6, 4), r(4, 3), r(4, 4), r(4), r(4)),
]


def moe_case(expected: str, tokens: tuple[int, ...], up: int, *biases: Tensor | None, **options: Any) -> Case:
    """Three experts of inner width 8, two a token."""
    routing = ints(3, *tokens, 2), r(*tokens, 2)
    return case(expected, composite.moe, r(*tokens, 6), *routing, r(3, up, 6), r(3, 6, 8), *biases, **options)


MOE = [
    moe_case("d0 d1 f experts!", (2, 4), 8, activation="gelu", gated=False),
    moe_case("d0 d1 experts!", (2, 4), 16, activation="silu", gated=True),
    moe_case("d0 d1 f experts!", (2, 4), 16, activation="silu", gated=True, interleaved=True),
    moe_case("d0! d1! f! experts!", (2, 4), 8, activation="gelu", gated=False, recipe="fp8-row"),
    moe_case("d0! experts!", (2, 4), 16, activation="silu", gated=True, capacity_factor=1.0),
    moe_case("d0 f experts!", (4,), 8, r(3, 8), activation="relu", gated=False),
    moe_case("d0 f! experts!", (4,), 8, None, r(3, 6), activation="relu", gated=False),
]

FOURIER = [
    case("d0 +", aten.fft_fft.default, c(6, 4)),
    case("d0 +", aten.fft_fft.default, r(6, 4), 8, 1),
    case("d1 +", aten.fft_ifft.default, c(4, 6), None, 0, "ortho"),
    case("d0 d2 +", aten.fft_rfft.default, r(6, 8, 2), None, 1),
    case("d0 +", aten.fft_irfft.default, c(6, 5), 8),
    case("d0 +", aten.fft_hfft.default, c(6, 5)),
    case("d0 +", aten.fft_fft2.default, c(6, 4, 2)),
    case("d0 +", aten.fft_rfft2.default, r(6, 4, 8)),
    case("d1 +", aten.fft_irfft2.default, c(4, 6, 3), None, [0, 2]),
    case("+", aten.fft_fftn.default, c(6, 4)),
    case("d0 +", aten.fft_ifftn.default, c(6, 4, 2), [4, 2]),
    case("d1 +", aten._fft_c2c.default, c(4, 6), [0], 0, True),
    case("d0 +", aten._fft_r2c.default, r(6, 4), [1], 0, True),
    case("d0 +", aten._fft_c2r.default, c(6, 5), [1], 2, 8),
    case("d0 +", aten.fft_fftshift.default, r(6, 4), [1]),
]

PRODUCTS = [*MATMUL, *ATTENTION, *CONV, *RECURRENT, *MOE, *FOURIER]
