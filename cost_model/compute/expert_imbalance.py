"""How unevenly routing divides rows among the ranks that share experts."""

from __future__ import annotations

from functools import lru_cache

# Of each layer the rows that its experts got.
Loads = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=1024)
def share_of_busiest(loads: Loads, num_experts: int, degree: int) -> float:
    """Rows of the one that has most of ``degree`` ranks, each with as many neighbouring experts, over the mean.

    On average of the layers with ``num_experts``; 1 where nothing is known of any.
    """
    found = []
    for load in loads:
        if len(load) == num_experts and sum(load) > 0:
            own = num_experts // degree
            most = max(sum(load[first : first + own]) for first in range(0, num_experts, own))
            found.append(degree * most / sum(load))
    return sum(found) / len(found) if found else 1.0
