"""Rates of fused attention kernels on devices of an architecture.

Shah et al. 2024, FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, print the rates of FlashAttention-2, cuDNN 9
and FlashAttention-3 on an H100 for 16,384 tokens and 2,048 columns of all heads. One H200 (``benchmarks/kernels.py``,
32 heads of 128, 8,192 tokens) gave 347 and 296 TFLOP/s for FlashAttention-2, 662 and 591 for cuDNN, full masks, and
0.88 to 0.92 of it for causal ones. Backward rates of 256-wide heads, and by length of causal masks, are not printed:
they are taken from the ratios that the H200 and the causal forward have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost_model.stacks.attention_rate import BACKWARD, AttentionKernel, Curve


def _kernel(
    name: str,
    peak_tflops: float,
    source: str,
    rates: Mapping[int, tuple[Sequence[float], Sequence[float]]],
    causal: Sequence[float],
    share: float = 1.0,
    *,
    early: bool = False,
) -> AttentionKernel:
    """From TFLOP/s by head size, forward and backward under a full mask, and forward of 128 under a causal one."""
    full = rates[128][0]
    curves = tuple(
        Curve(head, *(tuple(share * rate / peak_tflops for rate in part) for part in parts))
        for head, parts in rates.items()
    )
    ratio = tuple(c / f for c, f in zip(causal, full, strict=True))
    return AttentionKernel(name=name, curves=curves, causal=ratio, source=source, early=early)


def _scaled(rates: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * rate for rate in rates)


_PAPER = "Shah et al. 2024, FlashAttention-3, figures 5 and 6"
_H100, _A100 = 989.0, 312.0

_FLASH2_128 = (309, 350, 362, 368, 370, 370), (214, 260, 291, 310, 318, 322)
_FLASH2 = {
    64: ((282, 306, 318, 321, 322, 324), (198, 238, 264, 279, 287, 291)),
    128: _FLASH2_128,
    # One H200, 8,192 tokens: backward of 256-wide heads at 239 TFLOP/s, of 128-wide ones at 273.
    256: ((275, 313, 321, 323, 324, 326), _scaled(_FLASH2_128[1], 239 / 273)),
}
_FLASH2_CAUSAL = (191, 260, 298, 319, 333, 335)
_CUDNN_128 = (497, 574, 617, 609, 600, 595), (305, 408, 465, 499, 518, 516)
_CUDNN = {
    64: ((335, 373, 395, 408, 412, 413), (266, 348, 395, 417, 432, 433)),
    128: _CUDNN_128,
    # One H200: 413 and 521 TFLOP/s.
    256: ((470, 546, 580, 581, 580, 581), _scaled(_CUDNN_128[1], 413 / 521)),
}
_CUDNN_CAUSAL = (315, 410, 484, 518, 529, 539)

FLASH2_HOPPER = _kernel("FlashAttention-2", _H100, _PAPER, _FLASH2, _FLASH2_CAUSAL)
FLASH2_AMPERE = _kernel(
    "FlashAttention-2",
    _A100,
    "Dao 2023, FlashAttention-2: at most 73 % of an A100's peak forward and 63 % backward; by length as on an H100",
    _FLASH2,
    _FLASH2_CAUSAL,
    0.73 * _A100 / _FLASH2_128[0][-1],
)
FLASH1_AMPERE = _kernel(
    "FlashAttention",
    _A100,
    "Dao 2023, FlashAttention-2, section 1: FlashAttention has 30 to 50 % of an A100's peak forward, 25 to 35 % "
    "backward; as long sequences 0.40 and 0.30 are taken, by length as FlashAttention-2 on an H100",
    {128: (_scaled(_FLASH2_128[0], 0.40 * _A100 / 370), _scaled(_FLASH2_128[1], 0.30 * _A100 / 322))},
    _scaled(_FLASH2_CAUSAL, 0.40 * _A100 / 370),
)
# Of FlashAttention-2's shares of an A100's peak, forward and backward.
_TRITON = 0.73 / 1.4, 0.63 / 2
# FlashAttention-2 on an H100 without instructions of Hopper's reaches 335 TFLOP/s, 230 on an A100 (Dao 2023, forward
# and backward, recalled).
_HOPPER_OVER_AMPERE = 335 / 230


def _triton(peak_tflops: float, over_ampere: float, source: str) -> AttentionKernel:
    forward, backward = (over_ampere * share * _A100 for share in _TRITON)
    rates = {128: (_scaled(_FLASH2_128[0], forward / 370), _scaled(_FLASH2_128[1], backward / 322))}
    causal = _scaled(_FLASH2_CAUSAL, forward / 370)
    return _kernel("FlashAttention in Triton", peak_tflops, source, rates, causal, early=True)


TRITON_AMPERE = _triton(
    _A100,
    1.0,
    "Dao 2023, FlashAttention-2, section 4.1: FlashAttention-2 is 1.3 to 1.5 times as fast as FlashAttention in Triton "
    "forward, twice as fast backward; by length as FlashAttention-2 on an H100",
)
TRITON_HOPPER = _triton(
    _H100,
    _HOPPER_OVER_AMPERE,
    "as on an A100, and faster by what FlashAttention-2 gains on an H100, which has no instruction of Hopper's either",
)
CUDNN_HOPPER = _kernel("cuDNN 9", _H100, _PAPER, _CUDNN, _CUDNN_CAUSAL)
FLASH3_HOPPER = _kernel(
    "FlashAttention-3",
    _H100,
    _PAPER,
    {
        64: ((333, 392, 460, 476, 496, 497), (272, 363, 422, 453, 472, 474)),
        128: ((467, 565, 625, 638, 646, 648), (316, 424, 501, 542, 559, 561)),
    },
    (292, 423, 521, 579, 602, 616),
)
CUDNN_BLACKWELL = _kernel(
    "cuDNN 9",
    2250.0,
    "FlashAttention-4 (arXiv 2603.05451): 1,613 TFLOP/s forward on a B200, up to 1.3 times cuDNN 9.13; of 1,240 the "
    "share by head size and length as on an H100, backward too",
    _CUDNN,
    _CUDNN_CAUSAL,
    1613 / 1.3 / _CUDNN_128[0][-1],
)


def _blackwell_ultra() -> AttentionKernel:
    """The same on parts whose special function units take half as long for the exponentials.

    In 8-bit floats, where products take half as long as in 16 bits, the forward of DeepSeek-V3's attention is 1.35
    times as fast. If exponentials that nothing hides take x, of the 1 that a forward's products take in 16 bits, then
    (0.5 + x) / (0.5 + x / 2) = 1.35. The exponentials are as many in the backward, the products ``BACKWARD`` times.
    """
    exposed = (1.35 - 1) * 0.5 / (1 - 1.35 / 2)
    forward, backward = ((work + exposed) / (work + exposed / 2) for work in (1.0, BACKWARD))
    return replace(
        CUDNN_BLACKWELL,
        source=f"{CUDNN_BLACKWELL.source}; exponentials twice as fast (developer.nvidia.com/blog/"
        "making-softmax-more-efficient-with-nvidia-blackwell-ultra), of which the gain in 16 bits follows",
        curves=tuple(
            replace(curve, forward=_scaled(curve.forward, forward), backward=_scaled(curve.backward, backward))
            for curve in CUDNN_BLACKWELL.curves
        ),
    )


CUDNN_BLACKWELL_ULTRA = _blackwell_ultra()
