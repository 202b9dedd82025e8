"""Constants that were fitted to published training runs, by ``benchmarks/fit.py``. The catalogue multiplies by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One set of constants.

    sustained: rate of an endless matrix product in a training step, of the best that any shape was measured at, and of
        fused attention, of what its kernel was measured at alone.
    half_depth: depth of a product at which half of its rate is reached.
    memory: achieved fraction of memory bandwidth.
    launch_us: floor of the time of a kernel.
    power: exponent of the rate of a GPU that its power limits: twice the watts compute 2^power times as much.
    hidden: share of a tensor-parallel collective that a stack which overlaps it with a product hides.
    early_attention: rate of FlashAttention in Triton, of what the paper of FlashAttention-2 says of it.
    """

    sustained: float
    half_depth: float
    memory: float
    launch_us: float
    power: float
    hidden: float
    early_attention: float


FITTED = Fitted(
    sustained=0.84,
    half_depth=121.0,
    memory=0.80,
    launch_us=3.28,
    power=0.48,
    hidden=0.60,
    early_attention=1.20,
)
