"""How long a test waits for processes: as long as they compute, however slow the machine is.

    patience = Patience([process.pid], idle_s=60)
    while running():
        if reason := patience.lost():
            kill(process), fail(reason)

A clock says nothing on a machine that does twenty things at once. CPU time does: processes that wait for each other
use none, processes that wait for a core use what they get of it, and processes that run in circles use more and more.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

# A process on a core that twenty others want gets 5 % of it; one that sleeps between heartbeats uses less than this.
_SHARE = 0.01


class Patience:
    """CPU time of ``pids`` and all their descendants; it is lost when they stand still or run in circles.

    idle_s: seconds in which all together use less than a hundredth of a core. limit_s: CPU seconds of all together.
    """

    def __init__(self, pids: Iterable[int], *, idle_s: float, limit_s: float) -> None:
        self.idle_s, self.limit_s = idle_s, limit_s
        self.pause_s = min(2.0, idle_s / 8)
        """Seconds to let pass between two looks."""
        self._pids = tuple(pids)
        self._spent: dict[tuple[int, float], float] = {}
        self._seen: deque[tuple[float, float]] = deque()

    def lost(self) -> str | None:
        """Why there is no more point in waiting, if so."""
        now, spent = time.monotonic(), self._cpu_s()
        if spent > self.limit_s:
            return f"used {spent:.0f} s of CPU time, more than {self.limit_s:g}"
        self._seen.append((now, spent))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self.idle_s:
            self._seen.popleft()
        then, before = self._seen[0]
        if now - then >= self.idle_s and spent - before < _SHARE * self.idle_s:
            return f"did nothing for {self.idle_s:g} s"
        return None

    def _cpu_s(self) -> float:
        for process in self._processes():
            try:
                used = process.cpu_times()
                self._spent[process.pid, process.create_time()] = used.user + used.system
            except psutil.Error:
                continue  # ended since, with what it had used when it was last seen
        return sum(self._spent.values())

    def _processes(self) -> list[psutil.Process]:
        children: dict[int, list[psutil.Process]] = {}
        roots = []
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
            if process.pid in self._pids:
                roots.append(process)
        found = roots
        for process in found:  # which grows
            found += children.get(process.pid, [])
        return found

    def kill(self) -> None:
        """End the processes and all their descendants."""
        for process in reversed(self._processes()):
            try:
                process.kill()
            except psutil.Error:
                continue


def run(
    *command: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    shell: bool = False,
    idle_s: float = 120.0,
    limit_s: float = 1200.0,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a command whose output is read as text, with patience. Raises TimeoutError."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        what = command[0] if shell else command
        process = subprocess.Popen(what, env=env, cwd=cwd, shell=shell, stdout=out, stderr=err, text=True)
        patience = Patience([process.pid], idle_s=idle_s, limit_s=limit_s)
        reason = None
        while reason is None:
            try:
                process.wait(patience.pause_s)
                break
            except subprocess.TimeoutExpired:
                reason = patience.lost()
        if reason is not None:
            patience.kill()
            process.wait()
        out.seek(0), err.seek(0)
        done = subprocess.CompletedProcess(what, process.returncode, out.read(), err.read())
    if reason is not None:
        raise TimeoutError(f"{' '.join(command)}\n{reason}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done
