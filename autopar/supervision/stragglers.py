"""Ranks that are slower than those that do the same, by the seconds that each has worked itself and not waited.

    steps 41 to 60, seconds     rank 0   0.50  0.51  0.50 ...
                                rank 1   0.50  0.50  0.52 ...
                                rank 2   0.91  0.90  0.92 ...      rank 2 is 1.8 x slower, in each of them

Every 20 steps a supervisor writes what its ranks have told it to the store, and one of them compares.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.runtime.stores import Store
from autopar.supervision.decision import Decision
from autopar.supervision.local_ranks import LocalRanks

STEPS, TIMES = 20, 1.3
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """times: the median of the ranks that it is compared with. since: the first of the steps that were compared."""

    rank: int
    index: int
    host: str
    times: float
    since: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} is {self.times:.1f} x slower than the median of the ranks that do the "
            f"same, in each of {STEPS} steps since step {self.since}"
        )


def slow_ranks(own_s: Mapping[int, Sequence[float]], groups: Sequence[Sequence[int]]) -> dict[int, float]:
    """Rank -> how many times slower, of those that are more than 1.3 times slower in each of the steps.

    own_s: of each rank, of the same steps; NaN where it is not known, which is compared with nothing. groups: ranks
    that do the same work. The median of an even number of ranks is the lower of the two in the middle, so that one of
    two is compared with the other.
    """
    found = {}
    for group in groups:
        if not all(math.isfinite(one) for rank in group for one in own_s[rank]):
            continue
        medians = [statistics.median_low(step) for step in zip(*(own_s[rank] for rank in group), strict=True)]
        for rank in group:
            times = [own / median for own, median in zip(own_s[rank], medians, strict=True) if median > 0]
            if len(times) == len(medians) and all(one > TIMES for one in times):
                found[rank] = statistics.median(times)
    return found


class Stragglers:
    """Those of one round, as one supervisor sees them."""

    def __init__(
        self, store: Store, number: int, index: int, decision: Decision, ranks: LocalRanks, groups: list[list[int]]
    ) -> None:
        """number: of the round. index: of this supervisor. ranks: those that it runs. groups: that do the same."""
        self._store, self._number, self._index = store, number, index
        self._decision, self._ranks, self._groups = decision, ranks, groups
        self._members = [other for other, own in sorted(decision.ranks.items()) if own]
        self._window = -(-decision.source.step // STEPS)  # the first that is made as a whole
        self._told: tuple[int, dict[int, list[float]]] | None = None
        self._next_look = 0.0

    def look(self) -> list[Straggler]:
        """Those that have been found since the last call. Called often."""
        self._tell()
        now = time.monotonic()
        if self._told is None or not self._members or self._members[0] != self._index or now < self._next_look:
            return []
        self._next_look = now + _LOOK_S
        window, own_s = self._told[0], dict(self._told[1])
        for other in self._members[1:]:
            key = self._key(other)
            found: dict[str, Any] = {"window": -1}
            if self._store.check([key]):
                found = json.loads(self._store.get(key))
            if found["window"] < window:
                return []  # it is about to come
            if found["window"] > window:
                self._told = None
                return []
            own_s |= {int(rank): seconds for rank, seconds in found["own_s"].items()}
        self._told = None
        return [self._straggler(rank, times, window) for rank, times in slow_ranks(own_s, self._groups).items()]

    def _tell(self) -> None:
        """Once all ranks of this supervisor have made the next steps, take what they say of these."""
        own, stands = self._decision.ranks[self._index], self._ranks.stands()
        if not own or set(own) - stands.keys():
            return
        steps = min(progress.get().steps for progress in stands.values())
        if steps < (self._window + 1) * STEPS:
            return
        told = {rank: stands[rank].own_s(self._window * STEPS + 1, STEPS) for rank in own}
        kept = {rank: seconds for rank, seconds in told.items() if seconds is not None}
        if len(kept) < len(told):
            self._window = steps // STEPS
            return
        self._told = self._window, kept
        if len(self._members) > 1:
            self._store.set(self._key(self._index), json.dumps({"window": self._window, "own_s": kept}))
        self._window += 1

    def _key(self, index: int) -> str:
        return f"own_s/{self._number}/{index}"

    def _straggler(self, rank: int, times: float, window: int) -> Straggler:
        index = next(other for other in self._members if rank in self._decision.ranks[other])
        return Straggler(
            rank=rank, index=index, host=self._decision.hosts[index], times=times, since=window * STEPS + 1
        )
