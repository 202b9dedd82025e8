"""A training job that faults are put into: its processes, its output with the time of each line, its folders."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.runtime.copies.places import memory_folder
from autopar.supervision.hosts import job_prefix

ROOT = Path(__file__).parent.parent

# At ten times that the rounding of four steps under another plan grows to 2.7e-5 of the loss in 100 steps.
LEARNING_RATE = "1e-4"
_STEP = re.compile(r"^ *(\d+) +(-?\d+\.\d+) +(\d+\.\d+|before)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model under a plan. options: of the search. hosts: 1, or 2 network namespaces under torchrun."""

    name: str
    model: str
    ranks: int
    options: tuple[str, ...]
    hosts: int = 1


@dataclass(slots=True)
class Seen:
    """A line of output that has the loss of a step. reported: by the process that made the step; else before it."""

    at: float
    step: int
    loss: float
    reported: bool


@dataclass(slots=True)
class Job:
    """A job as a user starts it: one command, the same after every end of its launcher."""

    setting: Setting
    plan: Path
    folder: Path
    steps: int
    save_every: int
    names: tuple[str, ...] = ()
    seen: list[Seen] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    _launchers: list[subprocess.Popen[str] | None] = field(default_factory=list)

    def command(self, host: int) -> list[str]:
        train = [
            "autopar", "train", str(ROOT / self.setting.model), str(self.plan), "--steps", str(self.steps),
            "--keep-alive", "--job", str(self.folder), "--save-every", str(self.save_every), "--keep", "2",
            "--lr", LEARNING_RATE,
        ]  # fmt: skip
        if self.setting.hosts == 1:
            return [sys.executable, "-m", *train]
        run = [
            "ip", "netns", "exec", f"ap{host}", sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
            "--nproc-per-node", str(self.setting.ranks // self.setting.hosts), "--max-restarts", "100",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.88.0.1:29400", "--rdzv-id", self.folder.name,
            "--rdzv-conf", f"is_host={int(host == 0)},join_timeout=120,last_call_timeout=5", "--local-addr",
            f"10.88.0.{host + 1}", "--monitor-interval", "0.2", "-m",
        ]  # fmt: skip
        return [*run, *train, "--network-interface", f"apv{host}"]

    def start(self, hosts: Sequence[int] | None = None) -> None:
        """Start the launchers of these hosts, of all at first."""
        self._launchers = self._launchers or [None] * self.setting.hosts
        for host in range(self.setting.hosts) if hosts is None else hosts:
            process = subprocess.Popen(
                self.command(host), cwd=self.folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            self._launchers[host] = process
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines.append((time.monotonic(), line.rstrip()))
                if found := _STEP.match(line):
                    number, loss, seconds = found.groups()
                    self.seen.append(Seen(time.monotonic(), int(number), float(loss), seconds != "before"))

    def launcher(self, host: int = 0) -> subprocess.Popen[str]:
        found = self._launchers[host]
        assert found is not None
        return found

    @property
    def launchers_left(self) -> int:
        """Those that run."""
        return sum(process is not None and process.poll() is None for process in self._launchers)

    @property
    def tail(self) -> str:
        """The end of its output."""
        return "\n".join(line for _, line in self.lines[-30:])

    @property
    def done(self) -> bool:
        """Whether a rank has reported the last step."""
        return self.last >= self.steps

    @property
    def last(self) -> int:
        """The last step that was reported."""
        return max((seen.step for seen in self.seen), default=0)

    def processes(self, host: int | None = None) -> dict[int, int]:
        """Processes of the job, launchers aside -> their parents. host: of one namespace."""
        found = {}
        inside = None if host is None or self.setting.hosts == 1 else _inside(host)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                words = (path / "cmdline").read_bytes().decode().split("\0")
                if str(self.folder) not in words or "torch.distributed.run" in words or words[0] == "ip":
                    continue
                if inside is None or int(path.name) in inside:
                    found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        return found

    def ranks(self) -> list[int]:
        return sorted(pid for pid in self.processes() if _name(pid).startswith("autopar rank"))

    def hosts_with_ranks(self) -> list[int]:
        """Those on which ranks run now: after a loss all may be on one, where none has a partner."""
        ranks = set(self.ranks())
        return [host for host in range(self.setting.hosts) if ranks & self.processes(host).keys()]

    def supervisors(self) -> list[int]:
        found = self.processes()
        return sorted(pid for pid, parent in found.items() if parent not in found)

    def kill(self, host: int | None = None) -> None:
        """End all processes of a host, of all without one, and forget what their memory holds."""
        for number in range(self.setting.hosts) if host is None else [host]:
            launcher = self._launchers[number] if self._launchers else None
            if launcher is not None:
                with suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
            for pid in self.processes(number):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def forget(self, host: int | None = None) -> None:
        """Remove the copies in memory of a host; of all without one."""
        for folder in self.memory:
            if host is None or self.setting.hosts == 1 or folder.name.endswith(self.names[host]):
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def memory(self) -> list[Path]:
        """Folders in memory that hold its copies."""
        own = self.folder / "job"
        return list(memory_folder().glob(f"{job_prefix(own.read_text())}-*")) if own.exists() else []

    def wait_for(self, step: int, limit_s: float) -> bool:
        """Until a step is reported, by a process that made it; False if that takes too long."""
        until = time.monotonic() + limit_s
        while self.last < step:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


def _inside(host: int) -> set[int]:
    found = subprocess.run(["ip", "netns", "pids", f"ap{host}"], capture_output=True, text=True, check=False)
    return {int(word) for word in found.stdout.split()}


def name_of(host: int) -> str:
    """What the job calls a host; it takes seconds to ask."""
    command = ["ip", "netns", "exec", f"ap{host}", sys.executable, "-c"]
    code = "from autopar.supervision.hosts import host_name; print(host_name())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, code], capture_output=True, text=True, env=env, check=True).stdout.strip()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
