"""Supervisors come together through a store, whatever an earlier start has left in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from autopar.ir.errors import LaunchError
from autopar.supervision.council import Council
from autopar.supervision.decision import Decision, Facts, decide
from autopar.supervision.store import Address, OwnStore


@pytest.fixture
def address() -> Iterator[Address]:
    store = OwnStore()
    yield store.address
    store.stop()


def together(address: Address, size: int, lease_s: float = 60.0) -> list[Council]:
    found: dict[int, Council] = {}

    def come(index: int) -> None:
        found[index] = Council(address, index, size, lease_s=lease_s, join_s=60.0)

    threads = [threading.Thread(target=come, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(size)]


def close(councils: list[Council]) -> None:
    for council in councils:
        council.close()


def facts(index: int) -> Facts:
    return Facts(index=index, host=f"h{index}", slots=1)


def decided(known: object) -> Decision:
    assert isinstance(known, list)
    return decide(known, 1, (len(known), "plan"), {}, lambda room: None)


def meet(councils: list[Council], number: int) -> list[Decision | None]:
    found: dict[int, Decision | None] = {}

    def come(council: Council) -> None:
        found[council.index] = council.meet(number, facts(council.index), decided, 5.0)

    threads = [threading.Thread(target=come, args=(council,)) for council in councils]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[council.index] for council in councils]


def test_all_come_to_one_decision(address: Address) -> None:
    councils = together(address, 3)
    one, *others = meet(councils, 1)
    assert one is not None
    assert one.ranks == {0: (0,), 1: (1,), 2: (2,)}
    assert others == [one, one]
    close(councils)


def test_a_start_after_another_is_not_confused_by_it(address: Address) -> None:
    first = together(address, 2)
    first[0].stop(1, "a cause")
    close(first)
    second = together(address, 2)
    assert second[0].job == second[1].job != first[0].job
    assert second[1].stopped(1) is None
    close(second)


def test_the_first_cause_stays(address: Address) -> None:
    councils = together(address, 2)
    councils[1].stop(1, "rank 1 was killed")
    councils[0].stop(1, "rank 0 lost the others")
    assert [council.stopped(1) for council in councils] == ["rank 1 was killed"] * 2
    close(councils)


def test_one_that_does_not_answer_is_left_out(address: Address) -> None:
    councils = together(address, 2, lease_s=1.0)
    councils[1].close()  # no lease is renewed any more
    until = time.monotonic() + 30
    while councils[0].there != (0,) and time.monotonic() < until:
        councils[0].look()
        time.sleep(0.05)
    (found,) = meet(councils[:1], 1)
    assert found is not None
    assert found.ranks == {0: (0,)}
    close(councils)


def test_what_the_first_cannot_decide_is_raised_everywhere(address: Address) -> None:
    def refuse(known: object) -> Decision:
        raise LaunchError("no plan for so few")

    council = Council(address, 0, 1, lease_s=60.0, join_s=5.0)
    with pytest.raises(LaunchError, match="no plan for so few"):
        council.meet(1, facts(0), refuse, 5.0)


def test_those_that_never_come_are_said(address: Address) -> None:
    with pytest.raises(LaunchError, match="not all of 2 supervisors came"):
        Council(address, 0, 2, lease_s=60.0, join_s=0.3)


def test_a_store_ends_when_it_is_told(address: Address) -> None:
    store = OwnStore()
    store.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(store._pid, 0)


def test_one_that_comes_back_is_taken_up_in_the_next_round(address: Address) -> None:
    councils = together(address, 2, lease_s=1.0)
    councils[1].close()
    until = time.monotonic() + 30
    while councils[0].there != (0,) and time.monotonic() < until:
        councils[0].look()
        time.sleep(0.05)
    councils[0].stop(1, "no word from supervisor 1")
    (alone,) = meet(councils[:1], 2)
    assert alone is not None and alone.ranks == {0: (0,)}
    back = Council(address, 1, 2, lease_s=1.0, join_s=60.0, come_back=True)
    assert back.job == councils[0].job
    assert back.open_round("started again") == 2
    assert back.meet(2, facts(1), decided, 5.0) is None
    while councils[0].there != (0, 1) and time.monotonic() < until:
        councils[0].look()
        time.sleep(0.05)
    councils[0].stop(2, "supervisors have come back")
    both = meet([councils[0], back], back.open_round("started again"))
    assert both[0] is not None and both[0].ranks == {0: (0,), 1: (1,)}
    close([councils[0], back])


def test_the_round_ends_that_counts_on_one_that_was_started_again(address: Address) -> None:
    councils = together(address, 2)
    meet(councils, 1)
    councils[1].close()
    back = Council(address, 1, 2, lease_s=60.0, join_s=60.0, come_back=True)
    assert back.open_round("started again") == 2
    assert councils[0].stopped(1) == "started again"
    close([councils[0], back])


def test_nobody_comes_back_to_those_that_have_all_ended(address: Address) -> None:
    councils = together(address, 2)
    close(councils)
    with pytest.raises(LaunchError, match="not all of 2 supervisors came"):
        Council(address, 1, 2, lease_s=60.0, join_s=0.1, come_back=True)
