"""The probability that a plan fits: a predicted peak is off, and by how much is known from published runs.

The logarithm of real over predicted peak is taken as normal, with the mean and the standard deviation that
``benchmarks/feasibility.py`` measures; so with m bytes usable and p predicted

    P(fits) = Phi((ln(m / p) - mean) / deviation)
"""

from __future__ import annotations

from math import exp, inf, log
from statistics import NormalDist

# Of 34 published peaks (nanotron, Zero Bubble, torchtitan; benchmarks/feasibility.py, 2026-11-27): what they print is
# more by 9 % in the mean, as allocators reserve more than tensors take, and definitions differ.
LOG_ERROR = NormalDist(0.090, 0.161)

# Least probability to fit of what a search picks, unless the user says another: a predicted peak of 94 % of the usable
# bytes. Chosen; it is that of the searches whose results are recorded.
DEFAULT_MARGIN = 0.43
# The least of a plan whose degrees the user states and for which nothing fits better: 3 of 124 published runs
# that ran have less.
STATED_MARGIN = 0.2


def fit_probability(peak_bytes: float, usable_bytes: float) -> float:
    """Probability that a plan with this predicted peak runs in ``usable_bytes`` of a device."""
    return 1.0 if peak_bytes <= 0 else LOG_ERROR.cdf(log(usable_bytes / peak_bytes)) if usable_bytes < inf else 1.0


def share_to_fill(probability: float) -> float:
    """Share of the usable bytes that a predicted peak may take to fit with this probability."""
    return exp(-LOG_ERROR.inv_cdf(probability))
