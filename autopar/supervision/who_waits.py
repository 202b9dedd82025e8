"""Ranks that make no step say in which collective they wait; together that says who has not come to it.

rank 2 has not come to all_reduce number 14 of ranks 0, 1, 2, 3 (4 Float), where ranks 0, 1, 3 wait
  the last that it came to is all_gather number 9 of ranks 2, 3 (8 Float); it is at model.py:40 in batches
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from autopar.runtime.flight_recorder import Collective, Stand, named
from autopar.runtime.stores import Store
from autopar.supervision.decision import Decision
from autopar.supervision.local_ranks import LocalRanks

_EVERY_S = 1.0
# Of several collectives that are waited in.
_TOLD = 2
# Of a rank that makes steps.
_GOES_ON = Stand()


class WhoWaits:
    """Of one round, as one supervisor sees it."""

    def __init__(self, store: Store, number: int, index: int, decision: Decision, ranks: LocalRanks) -> None:
        """number: of the round. index: of this supervisor. ranks: those that it runs."""
        self._store, self._number, self._index = store, number, index
        self._members, self._ranks, self._next = decision.ranks, ranks, 0.0
        self._last: dict[int, Stand] = {}

    def look(self) -> None:
        """Tell the other supervisors what the ranks of this one say. Called often, it does so every now and then."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        now = dict(self._last)  # of ranks that have ended too: they have waited
        for rank, one in self._ranks.stands().items():
            words = one.said
            with suppress(ValueError, KeyError, TypeError):  # read while it is written: the next look is soon
                now[rank] = Stand.of_plain(json.loads(words)) if words else _GOES_ON
        if now != self._last and (self._last or any(stand != _GOES_ON for stand in now.values())):
            self._last = now
            plain = {rank: stand.to_plain() for rank, stand in now.items() if stand != _GOES_ON}
            self._store.set(self._key(self._index), json.dumps(plain))

    def told(self) -> str:
        """Who has not come to what, from what all ranks say; "" if no rank waits."""
        stands: dict[int, Stand] = {}
        for index in self._members:
            if self._store.check([self._key(index)]):
                plain = json.loads(self._store.get(self._key(index)))
                stands |= {int(rank): Stand.of_plain(one) for rank, one in plain.items()}
        return who_waits(stands)

    def _key(self, index: int) -> str:
        return f"stands/{self._number}/{index}"


def who_waits(stands: Mapping[int, Stand]) -> str:
    """From where each rank stands, in words: who has not come to the collectives that others wait in, and where it is
    in place of that. Ranks that wait for nobody themselves are the first to be named."""
    waited: dict[tuple[str, int], Collective] = {}
    for one in stands.values():
        if one.waits is not None:
            waited.setdefault((one.waits.group, one.waits.number), one.waits)

    def is_absent(rank: int, collective: Collective) -> bool:
        return rank not in stands or stands[rank].came.get(collective.group, 0) < collective.number

    def is_stuck(rank: int) -> bool:
        return rank not in stands or stands[rank].waits is None

    absent = {key: [r for r in one.ranks if is_absent(r, one)] for key, one in waited.items()}
    causes = [key for key, ranks in absent.items() if ranks and all(map(is_stuck, ranks))]
    keys = causes[:1] or sorted(waited, key=lambda key: not absent[key])
    return "\n".join(line for key in keys[:_TOLD] for line in _lines(waited[key], absent[key], stands))


def _lines(collective: Collective, absent: list[int], stands: Mapping[int, Stand]) -> Iterator[str]:
    here = [rank for rank, one in sorted(stands.items()) if one.waits is not None and _same(one.waits, collective)]
    where = f"{named(here)} wait{'s' if len(here) == 1 else ''}"
    if not absent:
        yield f"all of its ranks have come to {collective}, and it does not end: {where}"
        return
    yield f"{named(absent)} {'has' if len(absent) == 1 else 'have'} not come to {collective}, where {where}"
    first = next((rank for rank in absent if rank in stands), None)
    if first is not None:
        last, at = stands[first].last, stands[first].at
        came = "it has come to none before" if last is None else f"the last that it came to is {last}"
        yield f"  {'' if len(absent) == 1 else f'of rank {first}: '}{came}" + (f"; it is at {at}" if at else "")


def _same(one: Collective, other: Collective) -> bool:
    return (one.group, one.number) == (other.group, other.number)
