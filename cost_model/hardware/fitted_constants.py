"""Constants that were fitted to published training runs, by ``benchmarks/fit.py``. The catalogue multiplies by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One set of constants.

    matmul: rate of an endless matrix product in a training step, of the best that any shape was measured at.
    attention_ampere, attention_hopper: rate of fused attention, of the datasheet's.
    half_depth: depth of a product at which half of its rate is reached.
    memory: achieved fraction of memory bandwidth.
    launch_us: floor of the time of a kernel.
    power_500w: rate of an H100 of 500 W, of one of 700 W.
    """

    matmul: float
    attention_ampere: float
    attention_hopper: float
    half_depth: float
    memory: float
    launch_us: float
    power_500w: float

    @property
    def matmul_500w(self) -> float:
        """Efficiency of matrix products on devices limited to 500 W."""
        return self.matmul * self.power_500w

    @property
    def attention_500w(self) -> float:
        """Efficiency of fused attention on devices limited to 500 W."""
        return self.attention_hopper * self.power_500w


FITTED = Fitted(
    matmul=0.887,
    attention_ampere=0.327,
    attention_hopper=0.284,
    half_depth=121.0,
    memory=0.812,
    launch_us=3.28,
    power_500w=0.782,
)
