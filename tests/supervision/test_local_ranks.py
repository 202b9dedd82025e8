"""Ranks are forked, and whatever ends them is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from autopar.supervision import local_ranks
from autopar.supervision.local_ranks import FAILED, LocalRanks
from autopar.supervision.progress import Progress
from autopar.supervision.rank_exit import RankExit
from autopar.training.rank import LOST_OTHERS, LostOthers

Body = Callable[[int, int, Progress], int]


def end_of(body: Body, *, after: Callable[[int], None] = lambda pid: None, silent_s: float | None = None) -> RankExit:
    ranks = LocalRanks("host", silent_s)
    ranks.start([3], body)
    after(ranks.pids[3])
    until = time.monotonic() + 60
    found: list[RankExit] = []
    while not found and time.monotonic() < until:
        found = ranks.ended()
        time.sleep(0.01)
    ranks.end()
    return found[0]


def wait(rank: int, place: int, progress: Progress) -> int:
    progress.made(4, 3)
    time.sleep(60)
    return 0


def test_a_rank_that_is_done_has_code_0() -> None:
    assert end_of(lambda rank, place, progress: 0).code == 0


def test_an_error_is_said_in_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(rank: int, place: int, progress: Progress) -> int:
        raise ValueError("the reason")

    found = end_of(fails)
    assert found.code == FAILED
    assert str(found).endswith("ended with exit code 70 in step 1: ValueError: the reason")
    assert "Traceback" in capfd.readouterr().err


def test_a_rank_that_was_left_alone_is_not_the_cause() -> None:
    def lost(rank: int, place: int, progress: Progress) -> int:
        raise LostOthers("rank 5 has ended")

    assert end_of(lost).code == LOST_OTHERS


def test_a_signal_is_named() -> None:
    found = end_of(wait, after=lambda pid: (time.sleep(0.2), os.kill(pid, signal.SIGKILL))[0])
    assert not found.left
    assert str(found).startswith("rank 3 on host (process ")
    assert "was killed by signal 9 (SIGKILL)" in str(found)


def test_a_stopped_rank_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "STOPPED_S", 0.2)
    found = end_of(wait, after=lambda pid: os.kill(pid, signal.SIGSTOP))
    assert "was stopped for" in str(found)
    assert found.code == 128 + signal.SIGKILL


def test_a_rank_that_makes_no_step_is_ended() -> None:
    assert "made no step for" in str(end_of(wait, silent_s=0.3))


def test_a_rank_ends_with_its_supervisor() -> None:
    reader, writer = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        ranks = LocalRanks("host", None)
        ranks.start([0], wait)
        os.write(writer, str(ranks.pids[0]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(supervisor, 0)
    rank = int(os.read(reader, 32))
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{rank}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{rank}")
