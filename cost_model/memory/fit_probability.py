"""The probability that a plan fits: a predicted peak is off, and by how much is known from published runs.

The logarithm of real over predicted peak is taken as normal, with the mean and the standard deviation that
``benchmarks/feasibility.py`` measures; so with m bytes usable and p predicted

    P(fits) = Phi((ln(m / p) - mean) / deviation)
"""

from __future__ import annotations

from math import exp, inf, log
from statistics import NormalDist

# Of 59 published peaks (26 of nanotron, 21 of Zero Bubble, 12 of torchtitan; benchmarks/feasibility.py, 2026-11-27),
# each predicted for the software that it ran: 0.012 and 0.111, -0.021 and 0.032, 0.041 and 0.083 by source.
LOG_ERROR = NormalDist(0.006, 0.088)

# Least probability to fit of what a search picks, unless the user says another: a predicted peak of 99 % of the usable
# bytes. Chosen: it refuses 8 of 431 published runs that ran, and all plans predicted to need more than there is.
DEFAULT_MARGIN = 0.5


def fit_probability(peak_bytes: float, usable_bytes: float) -> float:
    """Probability that a plan with this predicted peak runs in ``usable_bytes`` of a device."""
    return 1.0 if peak_bytes <= 0 else LOG_ERROR.cdf(log(usable_bytes / peak_bytes)) if usable_bytes < inf else 1.0


def share_to_fill(probability: float) -> float:
    """Share of the usable bytes that a predicted peak may take to fit with this probability."""
    return exp(-LOG_ERROR.inv_cdf(probability))
