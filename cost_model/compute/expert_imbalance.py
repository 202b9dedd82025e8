"""How unevenly routing divides rows among the ranks that share experts."""

from __future__ import annotations

from functools import lru_cache

# Of each layer the rows that its experts got.
Loads = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=1024)
def share_of_busiest(loads: Loads, num_experts: int, degree: int) -> float:
    """Load imbalance: tokens on the busiest of ``degree`` ranks, each with equally many neighbouring experts, ÷ mean
    tokens per rank.

    Mean over the layers with ``num_experts`` experts; 1 if ``loads`` has none.
    """
    found = []
    for load in loads:
        if len(load) == num_experts and sum(load) > 0:
            own = num_experts // degree
            most = max(sum(load[first : first + own]) for first in range(0, num_experts, own))
            found.append(degree * most / sum(load))
    return sum(found) / len(found) if found else 1.0
