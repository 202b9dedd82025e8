"""Why a rank ended, in words: its exit code or signal, the out-of-memory killer, what it said itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from autopar.training.rank import LOST_OTHERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """status: as ``os.waitpid`` gives it; None of a rank that was ended because it stood still, for ``reason``."""

    rank: int
    host: str
    pid: int
    steps: int
    status: int | None = None
    reason: str = ""
    said: str = ""
    killed_for_memory: bool = False

    @property
    def code(self) -> int:
        """Exit code; 128 and more for a signal."""
        if self.status is None:
            return 128 + signal.SIGKILL
        if os.WIFSIGNALED(self.status):
            return 128 + os.WTERMSIG(self.status)
        return os.WEXITSTATUS(self.status)

    @property
    def left(self) -> bool:
        """Whether it ended by itself, with its exit code."""
        return self.status is not None and os.WIFEXITED(self.status)

    @property
    def in_vain(self) -> bool:
        """Whether it may have ended because it waited for another rank: NCCL's watchdog aborts such a one."""
        return self.status is None or self.code in (LOST_OTHERS, 128 + signal.SIGABRT)

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host} (process {self.pid})"
        if self.status is None:
            what = f"{where} {self.reason}, and was ended"
        elif os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            what = f"{where} was killed by signal {number} ({signal.Signals(number).name})"
            if self.killed_for_memory:
                what += ": the system's out-of-memory killer ended it, so its host has too little memory"
        else:
            what = f"{where} ended with exit code {self.code}"
        said = f": {self.said}" if self.said else ""
        return f"{what} in step {self.steps + 1}{said}"


def out_of_memory_kills() -> int:
    """Processes of this control group that the out-of-memory killer has ended so far; 0 where that is not told."""
    for file in (Path("/sys/fs/cgroup") / _group() / "memory.events", Path("/sys/fs/cgroup/memory.events")):
        try:
            fields = dict(line.split() for line in file.read_text().splitlines())
            return int(fields.get("oom_kill", "0"))
        except (OSError, ValueError):
            continue
    return 0


def _group() -> str:
    try:
        return Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return ""
