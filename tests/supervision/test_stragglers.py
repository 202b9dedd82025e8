"""Ranks that are slower than others: which are found, and what supervisors tell each other of them."""

from __future__ import annotations

import math
import time
from typing import cast

import pytest
import torch

from autopar.runtime.stores import HashStore, Store
from autopar.supervision import stragglers
from autopar.supervision.decision import Decision, Source
from autopar.supervision.local_ranks import LocalRanks
from autopar.supervision.progress import Progress
from autopar.supervision.stragglers import STEPS, Stragglers, slow_ranks
from autopar.training.own_time import OwnTime


@pytest.mark.parametrize(
    ("seconds", "groups", "found"),
    [
        ([1.0, 1.0, 1.8], [[0, 1, 2]], {2: 1.8}),
        ([1.0, 1.0, 1.2], [[0, 1, 2]], {}),
        ([2.0, 1.0], [[0, 1]], {0: 2.0}),
        ([1.0, 1.0, 2.0, 2.0], [[0, 1], [2, 3]], {}),  # a stage that has more to do
        ([1.0, 9.0], [[0], [1]], {}),
        ([1.0, 9.0, math.nan], [[0, 1, 2]], {}),
        ([0.0, 1.0], [[0, 1]], {}),
    ],
)
def test_a_rank_is_slow_among_those_that_do_the_same(
    seconds: list[float], groups: list[list[int]], found: dict[int, float]
) -> None:
    assert slow_ranks({rank: [one] * STEPS for rank, one in enumerate(seconds)}, groups) == found


def test_a_rank_that_is_fast_in_one_step_is_not_slow() -> None:
    assert slow_ranks({0: [1.0] * STEPS, 1: [9.0] * (STEPS - 1) + [1.0]}, [[0, 1]]) == {}


class Ranks:
    """What ranks say, which are not there."""

    def __init__(self, own_s: dict[int, float]) -> None:
        self._own_s, self._progress = own_s, {rank: Progress() for rank in own_s}

    def make(self, first: int, count: int) -> None:
        for step in range(first, first + count):
            for rank, progress in self._progress.items():
                progress.made(step, step, self._own_s[rank])

    def stands(self) -> dict[int, Progress]:
        return self._progress


def test_supervisors_put_together_what_their_ranks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "_LOOK_S", 0.0)
    store = cast(Store, HashStore())
    decision = Decision(
        generation=1, plan="", same_plan=True, ranks={0: (0, 1), 2: (2,), 3: ()}, hosts={0: "a", 2: "b", 3: "c"},
        source=Source(kind="copies", step=30),
    )  # fmt: skip
    here, there = Ranks({0: 0.1, 1: 0.1}), Ranks({2: 0.25})
    own = [
        Stragglers(store, 1, index, decision, cast(LocalRanks, ranks), [[0, 1, 2]])
        for index, ranks in ((0, here), (2, there))
    ]
    for ranks in (here, there):
        ranks.make(31, 29)
    assert own[0].look() == own[1].look() == own[0].look() == []  # steps 41 to 60 are not all made
    here.make(60, 1)
    assert own[0].look() == []
    there.make(60, 1)
    assert own[1].look() == []
    (found,) = own[0].look()
    assert (found.rank, found.index, found.host, found.since) == (2, 2, "b", 41)
    assert str(found).startswith("rank 2 on b is 2.5 x slower")
    assert own[0].look() == []


def test_seconds_that_are_no_longer_kept_are_passed_over() -> None:
    progress = Progress()
    for step in range(1, 101):
        progress.made(step, step, float(step))
    assert progress.own_s(81, 20) == [float(step) for step in range(81, 101)]
    assert progress.own_s(21, 20) is None
    progress.made(101, 101)
    assert progress.get().steps == 101


def _work(until: float) -> None:
    while time.thread_time() < until:
        pass


def test_own_time_is_that_of_work_and_of_the_batch_and_not_of_waiting() -> None:
    own = OwnTime(torch.device("cpu"))
    own.begin()
    time.sleep(0.02)
    own.loaded()
    time.sleep(0.5)
    waiting = own.end()
    own.begin()
    own.loaded()
    _work(time.thread_time() + 0.1)
    working = own.end()
    assert 0.02 <= waiting < 0.3
    assert working >= 0.1
