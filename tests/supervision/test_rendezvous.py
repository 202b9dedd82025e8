"""Supervisors come together through a store, whatever an earlier start has left in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from autopar.ir.errors import LaunchError
from autopar.supervision.decision import Decision, Facts, decide
from autopar.supervision.rendezvous import Rendezvous
from autopar.supervision.store import Address, OwnStore


@pytest.fixture
def address() -> Iterator[Address]:
    store = OwnStore()
    yield store.address
    store.stop()


def together(address: Address, size: int, lease_s: float = 60.0) -> list[Rendezvous]:
    found: dict[int, Rendezvous] = {}

    def come(index: int) -> None:
        found[index] = Rendezvous(address, index, size, lease_s=lease_s, join_s=60.0)

    threads = [threading.Thread(target=come, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rendezvous in found.values():  # a fork, which no other thread may run beside
        rendezvous.beat()
    return [found[index] for index in range(size)]


def close(meetings: list[Rendezvous]) -> None:
    for rendezvous in meetings:
        rendezvous.close()


def facts(index: int) -> Facts:
    return Facts(index=index, host=f"h{index}", slots=1)


def decided(known: object) -> Decision:
    assert isinstance(known, list)
    return decide(known, 1, (len(known), "plan"), {}, lambda room: None)


class LateStore:
    """A store whose first answer takes two seconds."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if self.asked == 1:
            time.sleep(2.0)
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def meet(meetings: list[Rendezvous], number: int) -> list[Decision | None]:
    found: dict[int, Decision | None] = {}

    def come(rendezvous: Rendezvous) -> None:
        found[rendezvous.index] = rendezvous.meet(number, facts(rendezvous.index), decided, 5.0)

    threads = [threading.Thread(target=come, args=(rendezvous,)) for rendezvous in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rendezvous.index] for rendezvous in meetings]


def test_all_come_to_one_decision(address: Address) -> None:
    meetings = together(address, 3)
    one, *others = meet(meetings, 1)
    assert one is not None
    assert one.ranks == {0: (0,), 1: (1,), 2: (2,)}
    assert others == [one, one]
    close(meetings)


def test_what_was_decided_before_is_known(address: Address) -> None:
    meetings = together(address, 2)
    assert [rendezvous.generation_before(1) for rendezvous in meetings] == [0, 0]
    (decision, _) = meet(meetings, 1)
    assert decision is not None
    meetings[0].stop(2, "before it began")
    assert [rendezvous.generation_before(3) for rendezvous in meetings] == [decision.generation] * 2
    close(meetings)


def test_a_start_after_another_is_not_confused_by_it(address: Address) -> None:
    first = together(address, 2)
    first[0].stop(1, "a cause")
    close(first)
    second = together(address, 2)
    assert second[0].job == second[1].job != first[0].job
    assert second[1].stopped(1) is None
    close(second)


def test_the_first_cause_stays(address: Address) -> None:
    meetings = together(address, 2)
    meetings[1].stop(1, "rank 1 was killed")
    meetings[0].stop(1, "rank 0 lost the others")
    assert [rendezvous.stopped(1) for rendezvous in meetings] == ["rank 1 was killed"] * 2
    close(meetings)


def test_one_that_does_not_answer_is_left_out(address: Address) -> None:
    meetings = together(address, 2, lease_s=1.0)
    meetings[1].close()  # no lease is renewed any more
    until = time.monotonic() + 30
    while meetings[0].there != (0,) and time.monotonic() < until:
        meetings[0].look()
        time.sleep(0.05)
    (found,) = meet(meetings[:1], 1)
    assert found is not None
    assert found.ranks == {0: (0,)}
    close(meetings)


def test_one_that_was_cut_off_does_not_take_the_others_for_lost(address: Address) -> None:
    meetings = together(address, 2, lease_s=1.5)
    for rendezvous in meetings:
        rendezvous.look()
    time.sleep(0.6)
    late = LateStore(meetings[1].store)
    meetings[1].store = cast(Any, late)
    for _ in range(20):
        meetings[1].look()
        assert meetings[1].there == (0, 1)
        assert not meetings[1].leads
        time.sleep(0.05)
    assert late.asked > 1
    close(meetings)


def test_what_the_first_cannot_decide_is_raised_everywhere(address: Address) -> None:
    def refuse(known: object) -> Decision:
        raise LaunchError("no plan for so few")

    rendezvous = Rendezvous(address, 0, 1, lease_s=60.0, join_s=5.0)
    with pytest.raises(LaunchError, match="no plan for so few"):
        rendezvous.meet(1, facts(0), refuse, 5.0)


def test_those_that_never_come_are_said(address: Address) -> None:
    with pytest.raises(LaunchError, match="not all of 2 supervisors came"):
        Rendezvous(address, 0, 2, lease_s=60.0, join_s=0.3)


def test_a_store_ends_when_it_is_told(address: Address) -> None:
    store = OwnStore()
    store.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(store._pid, 0)


def test_one_that_comes_back_is_taken_up_in_the_next_round(address: Address) -> None:
    meetings = together(address, 2, lease_s=1.0)
    meetings[1].close()
    until = time.monotonic() + 30
    while meetings[0].there != (0,) and time.monotonic() < until:
        meetings[0].look()
        time.sleep(0.05)
    meetings[0].stop(1, "no word from supervisor 1")
    (alone,) = meet(meetings[:1], 2)
    assert alone is not None and alone.ranks == {0: (0,)}
    back = Rendezvous(address, 1, 2, lease_s=1.0, join_s=60.0, come_back=True)
    back.beat()
    assert back.job == meetings[0].job
    assert back.open_round("started again") == 2
    assert back.meet(2, facts(1), decided, 5.0) is None
    while meetings[0].there != (0, 1) and time.monotonic() < until:
        meetings[0].look()
        time.sleep(0.05)
    meetings[0].stop(2, "supervisors have come back")
    both = meet([meetings[0], back], back.open_round("started again"))
    assert both[0] is not None and both[0].ranks == {0: (0,), 1: (1,)}
    close([meetings[0], back])


def test_the_round_ends_that_counts_on_one_that_was_started_again(address: Address) -> None:
    meetings = together(address, 2)
    meet(meetings, 1)
    meetings[1].close()
    back = Rendezvous(address, 1, 2, lease_s=60.0, join_s=60.0, come_back=True)
    assert back.open_round("started again") == 2
    assert meetings[0].stopped(1) == "started again"
    close([meetings[0], back])


def test_nobody_comes_back_to_those_that_have_all_ended(address: Address) -> None:
    meetings = together(address, 2)
    close(meetings)
    with pytest.raises(LaunchError, match="not all of 2 supervisors came"):
        Rendezvous(address, 1, 2, lease_s=60.0, join_s=0.1, come_back=True)
