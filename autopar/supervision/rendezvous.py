"""Supervisors agree, through a store: who is there, when to stop, from what to go on. One alone agrees with itself.

    lease/i     a number that supervisor i raises; one whose number stays the same is lost, until it moves again; "left"
    stop/r      the cause that ended round r: the first one that is written
    facts/r/i   what supervisor i knows as round r begins
    go/r        who is in it and what it does, written by the first of those that are there

Keys of an earlier start may be in the store of an agent that has restarted its workers: all of these are under a name
that supervisors agree on as they come together (``runtime.gathering``), which is new each time.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from autopar.ir.errors import LaunchError
from autopar.ir.fork import fork
from autopar.runtime.gathering import gather, last_gathering
from autopar.runtime.stores import DistError, PrefixStore, Store
from autopar.supervision.decision import Decision, Facts
from autopar.supervision.forked import die_with
from autopar.supervision.store import Address

POLL_S = 0.05
_BEAT_S = 0.5
_LIVES_S = 3.0
_LEFT = "left"


class Rendezvous:
    """One supervisor's place among all of them."""

    def __init__(
        self, address: Address, index: int, size: int, *, lease_s: float, join_s: float, come_back: bool = False
    ) -> None:
        """lease_s: a supervisor that is not heard of for longer is lost. join_s: for all to come together. come_back:
        to those that have come together already, if any of them are there, in the place of one that has ended."""
        store = address.connect()
        self.index, self.size, self._lease_s = index, size, lease_s
        name = last_gathering(store, size) if come_back and size > 1 else None
        if name is None or not _lives(PrefixStore(f"autopar/{name}", store), size):
            name = gather(store, index, size, join_s, "supervisor")
        self.job = name
        self.store = PrefixStore(f"autopar/{self.job}", store)
        self._looked_at, self._looked_s = 0.0, 0.0
        self._seen: dict[int, tuple[str, float]] = {}
        self._fresh = tuple(range(size))
        self._address = address
        self._beater: int | None = None

    def beat(self) -> None:
        """Be there from now on, for the others to see."""
        if self.size > 1 and self._beater is None:
            self._beater = _beat(self._address, self.job, self.index)

    def close(self) -> None:
        """Be there no more."""
        if self._beater is not None:
            os.kill(self._beater, signal.SIGKILL)
            os.waitpid(self._beater, 0)
            self._beater = None
            with suppress(DistError):  # the store may be what is lost
                self.store.set(f"lease/{self.index}", _LEFT)

    def look(self) -> None:
        """See who else is there. Called often, it does so every now and then. Seconds without a look, as the store did
        not answer or this one planned, do not make another lost: this one may be what was cut off."""
        since = time.monotonic() - self._looked_at
        if since < _BEAT_S or self.size == 1:
            return
        self._looked_s += min(since, 2 * _BEAT_S)
        fresh = []
        for other in range(self.size):
            key = f"lease/{other}"
            value = self.store.get(key).decode() if self.store.check([key]) else ""
            if other not in self._seen or self._seen[other][0] != value:
                self._seen[other] = value, self._looked_s
            if value != _LEFT and self._looked_s - self._seen[other][1] <= self._lease_s:
                fresh.append(other)
        self._looked_at, self._fresh = time.monotonic(), tuple(fresh)

    @property
    def there(self) -> tuple[int, ...]:
        """Those that have been heard of lately, in order; this one is among them."""
        return tuple(sorted({*self._fresh, self.index}))

    @property
    def leads(self) -> bool:
        """Whether this is the first of those that are there."""
        return self.there[0] == self.index

    def stop(self, number: int, cause: str) -> None:
        """End a round, for a cause, unless one has ended it."""
        self.store.compare_set(f"stop/{number}", "", cause)

    def stopped(self, number: int) -> str | None:
        """The cause that has ended a round."""
        key = f"stop/{number}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def exclude(self, number: int, index: int, rank: int) -> None:
        """From the next round on supervisor ``index`` is to do without the place that runs ``rank`` in this one."""
        self.store.set(f"excluded/{number}", json.dumps([index, rank]))

    def excluded(self, number: int) -> int | None:
        """The rank of this supervisor that was excluded in a round."""
        key = f"excluded/{number}"
        index, rank = json.loads(self.store.get(key)) if self.store.check([key]) else (None, None)
        return rank if index == self.index else None

    def open_round(self, cause: str) -> int:
        """The round to begin with: 1, but for one that has come back; a round that counts on it ends, for a cause."""
        number = next(number for number in itertools.count(1) if self.stopped(number) is None)
        key = f"go/{number}"
        if self.store.check([key]) and str(self.index) in json.loads(self.store.get(key)).get("ranks", ()):
            self.stop(number, cause)
            number += 1
        return number

    def meet(
        self, number: int, facts: Facts, decide: Callable[[Sequence[Facts]], Decision], wait_s: float
    ) -> Decision | None:
        """Come to a decision on a round; None if this supervisor is not in it, or it has ended before it began.

        decide: called on the first of those that are there. It may raise LaunchError, which is raised everywhere.
        wait_s: for what others know.
        """
        self.store.set(f"facts/{number}/{self.index}", json.dumps(asdict(facts)))
        deadline = time.monotonic() + wait_s
        while True:
            self.look()
            if self.store.check([f"go/{number}"]):
                return self._read(number)
            if self.stopped(number) is not None:
                return None
            if self.leads:
                found = {other: self._facts(number, other) for other in self.there}
                known = [fact for fact in found.values() if fact is not None]
                if len(known) == len(found) or time.monotonic() > deadline:
                    self.store.compare_set(f"go/{number}", "", _decided(known, decide))
                    continue
            time.sleep(POLL_S)

    def _facts(self, number: int, other: int) -> Facts | None:
        key = f"facts/{number}/{other}"
        return Facts.of_json(json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _read(self, number: int) -> Decision | None:
        found: dict[str, Any] = json.loads(self.store.get(f"go/{number}"))
        if "error" in found:
            raise LaunchError(found["error"])
        decision = Decision.of_json(found)
        return decision if self.index in decision.ranks else None

    def generation_before(self, number: int) -> int:
        """The generation of the latest round before this one that there was a decision on; 0 without one."""
        keys = (f"go/{earlier}" for earlier in range(number - 1, 0, -1))
        decided = (json.loads(self.store.get(key)) for key in keys if self.store.check([key]))
        return next((int(found["generation"]) for found in decided if "generation" in found), 0)

    def done(self, number: int) -> int:
        """This one's ranks have finished; returns how many supervisors' have."""
        return int(self.store.add(f"done/{number}", 1))

    def num_done(self, number: int) -> int:
        """How many supervisors' ranks have finished."""
        return int(self.store.add(f"done/{number}", 0))


def _lives(store: Store, size: int) -> bool:
    """Whether any supervisor raises its number. It takes a few beats to see that one does not that was killed."""
    keys = [f"lease/{index}" for index in range(size)]

    def leases() -> list[str]:
        return [store.get(key).decode() if store.check([key]) else "" for key in keys]

    before, until = leases(), time.monotonic() + _LIVES_S
    while any(lease != _LEFT for lease in before) and time.monotonic() < until:
        if leases() != before:
            return True
        time.sleep(POLL_S)
    return False


def _beat(address: Address, job: str, index: int) -> int:
    """A process that says that this one is there, as long as it is: planning may keep this one busy for seconds."""
    parent = os.getpid()
    pid = fork()
    if pid:
        return pid
    die_with(parent, "autopar lease")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        store = PrefixStore(f"autopar/{job}", address.connect())
        for number in itertools.count():
            store.set(f"lease/{index}", str(number))
            time.sleep(_BEAT_S)
    finally:
        os._exit(1)


def _decided(known: Sequence[Facts], decide: Callable[[Sequence[Facts]], Decision]) -> str:
    try:
        return json.dumps(asdict(decide(known)))
    except LaunchError as error:
        return json.dumps({"error": str(error)})
