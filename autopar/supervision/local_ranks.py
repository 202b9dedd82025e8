"""The ranks of one host: forked from the supervisor, which has imported everything, and watched by it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.ir.errors import AutoparError
from autopar.ir.fork import fork
from autopar.process_end import end_process
from autopar.supervision.forked import die_with
from autopar.supervision.progress import Progress, RankProgress
from autopar.supervision.rank_exit import RankExit, out_of_memory_kills
from autopar.training.rank import LOST_OTHERS, LostOthers

# A rank that is stopped for longer is taken for lost; somebody may stop one to look at it.
STOPPED_S = 3.0
FAILED = 70
"""Exit code of a rank that raised an error."""


@dataclass(slots=True)
class _Rank:
    number: int
    pid: int
    progress: Progress
    said: int
    stopped_since: float | None = None


class LocalRanks:
    """Ranks that run on this host. start: what one does, in a process of its own; returns the exit code. said: the file
    that a rank writes its last words to."""

    def __init__(self, host: str, silent_s: float | None) -> None:
        """silent_s: a rank that makes no step for longer, after its first, is taken for lost; None: never."""
        self._host, self._silent_s = host, silent_s
        self._running: list[_Rank] = []
        self._started: list[_Rank] = []
        self._kills = out_of_memory_kills()

    def start(self, ranks: Sequence[int], body: Callable[[int, int, Progress], int]) -> None:
        """Fork them. body: of (rank, its place on this host, what it says of itself to this process) -> exit code."""
        self._kills = out_of_memory_kills()
        sys.stdout.flush()
        sys.stderr.flush()
        for place, rank in enumerate(ranks):
            progress = Progress()
            reader, writer = os.pipe()
            parent = os.getpid()
            pid = fork()
            if pid == 0:
                os.close(reader)
                die_with(parent, f"autopar rank {rank}")
                end_process(_run(body, rank, place, progress, writer))
            os.close(writer)
            os.set_blocking(reader, False)
            self._running.append(_Rank(rank, pid, progress, reader))
        self._started = list(self._running)

    @property
    def running(self) -> list[int]:
        """Numbers of the ranks that have not ended."""
        return [rank.number for rank in self._running]

    @property
    def pids(self) -> dict[int, int]:
        """Their processes."""
        return {rank.number: rank.pid for rank in self._running}

    def last_progress(self) -> list[RankProgress]:
        """What all of them have said last, those that have ended too."""
        return [rank.progress.get() for rank in self._started]

    def stands(self) -> dict[int, Progress]:
        """What they say of themselves."""
        return {rank.number: rank.progress for rank in self._running}

    def ended(self) -> list[RankExit]:
        """Those that have ended since the last call, or stand still, which are ended."""
        found = []
        for rank in list(self._running):
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                found.append(self._ending(rank, status=status))
            elif reason := self._stands_still(rank):
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
                found.append(self._ending(rank, reason=reason))
        return found

    def _ending(self, rank: _Rank, *, status: int | None = None, reason: str = "") -> RankExit:
        self._running.remove(rank)
        said = b""
        with suppress(BlockingIOError):
            said = os.read(rank.said, 4096)
        os.close(rank.said)
        killed = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return RankExit(
            rank=rank.number,
            host=self._host,
            pid=rank.pid,
            steps=rank.progress.get().steps,
            status=status,
            reason=reason,
            said=said.decode(errors="replace"),
            killed_for_memory=killed and out_of_memory_kills() > self._kills,
        )

    def _stands_still(self, rank: _Rank) -> str:
        now = time.monotonic()
        if _state(rank.pid) not in ("T", "t"):
            rank.stopped_since = None
        elif rank.stopped_since is None:
            rank.stopped_since = now
        elif now - rank.stopped_since > STOPPED_S:
            return f"was stopped for {STOPPED_S:.0f} s (SIGSTOP)"
        stand = rank.progress.get()
        if self._silent_s is not None and stand.began and now - stand.since > self._silent_s:
            return f"made no step for {self._silent_s:.0f} s"
        return ""

    def signal(self, number: int) -> None:
        """Send all of them a signal."""
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def end(self) -> None:
        """End all of them at once."""
        self.signal(signal.SIGKILL)
        for rank in self._running:
            os.waitpid(rank.pid, 0)
            os.close(rank.said)
        self._running = []


def _run(body: Callable[[int, int, Progress], int], rank: int, place: int, progress: Progress, said: int) -> int:
    """The exit code of a rank, whose last words go to the pipe ``said``."""
    try:
        return body(rank, place, progress)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        lost = isinstance(error, LostOthers)
        if not isinstance(error, (LostOthers, AutoparError)):
            traceback.print_exc()
        words = str(error) if lost else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            os.write(said, (words.splitlines() or [""])[0][:4000].encode())
        return LOST_OTHERS if lost else FAILED


def _state(pid: int) -> str:
    """Of a process, as the kernel writes it; "" where it does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
