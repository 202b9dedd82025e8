"""Processes come together at a store that has the keys of earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from autopar.ir.errors import LaunchError
from autopar.runtime.gathering import gather
from autopar.runtime.stores import HashStore, Store


def gathered(store: Store, size: int, wait_s: float = 60) -> list[str]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda index: gather(store, index, size, wait_s), range(size)))


def test_all_get_one_name_and_the_next_ones_another() -> None:
    store = HashStore()
    names = [gathered(store, size) for size in (3, 3, 2, 3)]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == len(names)


def test_keys_of_an_earlier_start_stand_for_nobody() -> None:
    store = HashStore()
    gathered(store, 3)
    with pytest.raises(LaunchError, match="this is rank 1, and one that came has ended or does not answer"):
        gather(store, 1, 3, 0.1)
    with pytest.raises(LaunchError, match="not all of 3 ranks came in 0 s"):
        gather(store, 0, 3, 0.1)


def test_who_is_started_again_meanwhile_is_waited_for() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        started = [threads.submit(gather, store, index, 3, 60) for index in (0, 1)]
        with pytest.raises(LaunchError):
            gather(store, 2, 3, 0.0)  # has greeted, and ends
        again = threads.submit(gather, store, 2, 3, 60)
        assert len({one.result() for one in (*started, again)}) == 1


def test_who_is_missing_is_named() -> None:
    with pytest.raises(LaunchError, match="this is supervisor 1, and supervisor 0, 2 did not come"):
        gather(HashStore(), 1, 3, 0.1, "supervisor")
