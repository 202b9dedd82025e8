"""torchrun starts a worker for each rank; of a supervised job one of each host supervises, and the others wait for it.

They wait without importing torch, so a start takes the imports, the capture and the programs of one process a host,
from which all of its ranks are forked.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from autopar.process_end import end_with
from autopar.training.notice import SIGNALS

_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")
_DONE = b"0"
_RETRY_S, _LATE_S = 0.1, 5.0


def hosts_are_numbered(environment: Mapping[str, str]) -> bool:
    """Whether the launcher of this process has said which host it is on, as torchrun does; not all do."""
    return {"GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys()


def is_to_wait(environment: Mapping[str, str]) -> bool:
    """Whether another process of this host supervises its ranks."""
    return hosts_are_numbered(environment) and environment["LOCAL_RANK"] != "0"


def wait_for_supervisor() -> NoReturn:
    """End well once the supervisor of this host has. If it ends otherwise the launcher ends this process as well."""
    asked: list[int] = []
    end_with(os.getppid())
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: asked.append(number))
    heard = False
    while not (heard or asked):
        with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
            line.connect(_meeting_point(os.environ))
            heard = True
            if line.recv(1) == _DONE:  # a signal does not end the wait: ranks may be saving
                sys.exit(0)
        time.sleep(_RETRY_S)
    while not asked:
        time.sleep(_RETRY_S)
    sys.exit(128 + asked[0])


@contextmanager
def awaited(workers: int) -> Iterator[Callable[[], None]]:
    """So many processes of this host wait for the end of this one; gives what tells them that it is a good one."""
    if not workers:
        yield lambda: None
        return
    point = _meeting_point(os.environ)
    with socket.socket(socket.AF_UNIX) as door:
        _remove(point)  # of a process that was killed
        door.bind(point)
        door.listen(workers)
        door.settimeout(_LATE_S)

        def tell() -> None:
            with suppress(OSError):  # one that is not there
                for _ in range(workers):
                    line, _ = door.accept()
                    with line:
                        line.send(_DONE)

        try:
            yield tell
        finally:
            _remove(point)


def _meeting_point(environment: Mapping[str, str]) -> str:
    """Address of a socket: one for the workers that an agent of torchrun has started at once, and for no others."""
    job = "\0".join(environment.get(name, "") for name in _JOB)
    name = f"autopar-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
    # Linux has names of sockets that are no files: a path, of which it takes 107 bytes, may be too long.
    return f"\0{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / name)


def _remove(point: str) -> None:
    if not point.startswith("\0"):
        Path(point).unlink(missing_ok=True)
