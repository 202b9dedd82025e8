"""From one checkpoint to the next: first-order formulas, and the minimum of the exact expectation.

With M seconds between failures, each of which costs the work since the last checkpoint, and d seconds to save one,

    Young 1974    sqrt(2 d M)               doi.org/10.1145/361147.361115
    Daly 2006     sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d,  M if d >= 2M
                                            doi.org/10.1016/j.future.2004.11.016

Both take a checkpoint to be safe as soon as training goes on. Here it is safe when its write is complete, and several
kinds of failure cost different amounts, so the minimum is searched: a golden section of the logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, expm1, inf, log, sqrt


def young_s(save_s: float, between_failures_s: float) -> float:
    """Young's interval between checkpoints, in seconds."""
    return sqrt(2 * save_s * between_failures_s)


def daly_s(save_s: float, between_failures_s: float) -> float:
    """Daly's interval between checkpoints, in seconds."""
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = save_s / (2 * between_failures_s)
    return young_s(save_s, between_failures_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def minimum(cost: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-3) -> float:
    """Where ``cost`` is least between two positive bounds, if it falls and then rises. tolerance: relative."""
    golden = (sqrt(5) - 1) / 2
    a, b = log(low), log(high)
    c, d = b - golden * (b - a), a + golden * (b - a)
    at_c, at_d = cost(exp(c)), cost(exp(d))
    while b - a > tolerance:
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - golden * (b - a)
            at_c = cost(exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + golden * (b - a)
            at_d = cost(exp(d))
    return exp((a + b) / 2)


def expected_age_s(rate_per_s: float, period_s: float, latency_s: float = 0.0) -> float:
    """Expected seconds since the newest snapshot that can be used, when a failure comes.

    Failures come at random, ``rate_per_s``; after each, snapshots start anew, one every ``period_s``, and each can be
    used ``latency_s`` later. Snapshot n can be used if the failure comes after n period + latency, so the expected age
    is 1 / rate less the sum of period exp(-rate (n period + latency)) over n.
    """
    if period_s == inf:
        return 1 / rate_per_s
    x = rate_per_s * period_s
    if x + rate_per_s * latency_s < 1e-5:  # The difference below would be rounding.
        return period_s / 2 + latency_s
    return 1 / rate_per_s - period_s * exp(-rate_per_s * latency_s) / expm1(x) if x < 700 else 1 / rate_per_s
