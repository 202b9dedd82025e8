"""What tells hosts apart, and where on one a job keeps its copies."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path

from autopar.runtime.copies.places import memory_folder


def host_name() -> str:
    """Of this host, another one for each: containers of one machine have networks of their own."""
    return f"{socket.gethostname()}-{hashlib.sha256(_identity().encode()).hexdigest()[:6]}"


def copies_folder(job: str) -> Path:
    """Where the ranks of a job on this host copy their state to. job: what names it, the same on every host."""
    digest = hashlib.sha256(job.encode()).hexdigest()[:12]
    return memory_folder() / f"autopar-{os.getuid()}-{digest}-{host_name()}"


def _identity() -> str:
    found = socket.gethostname()
    with suppress(OSError):  # not on Linux
        found += Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    return found
