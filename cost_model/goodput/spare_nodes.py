"""How many nodes are out of service at a time.

Nodes are lost at random and each is repaired on its own, so their number is that of a queue with as many servers as
customers: Poisson with mean rate x repair time, whatever the distribution of repair times (M/G/inf; Erlang). Failures
that take c nodes at once, which are repaired together, count c each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.goodput.protection_costs import Hazard

# Probability beyond which larger numbers are left out.
_TAIL = 1e-12


def poisson(mean: float) -> NDArray[np.float64]:
    """Probabilities of 0, 1, 2, ..., up to where nearly nothing is left."""
    size = int(mean + 12 * mean**0.5 + 20)
    logarithms = np.arange(1, size + 1)
    logs = np.concatenate(([0.0], np.cumsum(np.log(mean / logarithms)))) if mean > 0 else np.zeros(1)
    found: NDArray[np.float64] = np.exp(logs - mean)
    return found


def out_of_service(hazards: Sequence[Hazard], repair_s: float) -> list[float]:
    """Probability that so many nodes are being repaired, for 0, 1, 2, ...; adds up to 1."""
    total = np.ones(1)
    by_size: dict[int, float] = {}
    for hazard in hazards:
        if hazard.lost_nodes:
            by_size[hazard.lost_nodes] = by_size.get(hazard.lost_nodes, 0.0) + hazard.rate_per_s * repair_s
    for size, mean in by_size.items():
        groups = poisson(mean)
        apart = np.zeros((len(groups) - 1) * size + 1)
        apart[::size] = groups
        total = np.convolve(total, apart)
    last = int(np.flatnonzero(total > _TAIL)[-1])
    kept = total[: last + 1]
    found: list[float] = (kept / kept.sum()).tolist()
    return found
