"""Actors of a supervised job on Ray: a coordinator, where supervisors meet, and for each rank one with a supervisor.

A supervisor forks, which a process with Ray's threads must not do: it is a process that its actor starts, the same as
under torchrun, and it ends with the actor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import IO, Any

from autopar.launching.ray_rank import address_of

Line = tuple[str, str]
"""The stream, "out" or "err", and what was written to it."""


class CoordinatorActor:
    """Keeps the store that supervisors meet at, and what they write until it is taken."""

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def serve(self, interface: str | None) -> tuple[str, int]:
        """Address and port of the store; it lives as long as this actor."""
        import ray

        from autopar.runtime.stores import TCPStore

        address = ray.util.get_node_ip_address() if interface is None else address_of(interface)
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def put(self, line: Line) -> None:
        """Keep a line."""
        self._lines.append(line)

    def take(self) -> list[Line]:
        """The lines that have come since the last call."""
        taken, self._lines = self._lines, []
        return taken


class SupervisorActor:
    """Runs a supervisor for one rank. Two of its methods run at once: ``supervise`` and the others."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def host(self) -> tuple[str, str]:
        """The machine of this actor: its id with Ray, and its address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def supervise(self, job: str, variables: dict[str, str], coordinator: Any) -> int:
        """Supervise a rank of a job, given as JSON; the exit code of the supervisor, negative for a signal."""
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            (sys.executable, "-u", "-m", "autopar.launching", job, str(os.getpid())),
            env=os.environ | variables | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        readers = [
            threading.Thread(target=_pass_on, args=(name, stream, coordinator))
            for name, stream in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        for reader in readers:
            reader.join()
        return code

    def signal(self, number: int) -> None:
        """Send the supervisor a signal."""
        if self._process is not None:
            self._process.send_signal(number)


def _pass_on(name: str, stream: IO[str] | None, coordinator: Any) -> None:
    import ray

    for line in stream or ():
        # Waits for the line to be kept, so that none is missing when the supervisor has ended.
        ray.get(coordinator.put.remote((name, line.rstrip("\n"))))
