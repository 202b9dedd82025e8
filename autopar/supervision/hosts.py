"""What tells hosts apart, and where on one a job keeps its copies."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import uuid
from contextlib import suppress
from pathlib import Path

from autopar.runtime.copies.places import memory_folder

_OWNER, _IDENTITY = "owner-", "job"


def host_name() -> str:
    """Of this host, another one for each: containers of one machine have networks of their own."""
    return f"{socket.gethostname()}-{hashlib.sha256(_identity().encode()).hexdigest()[:6]}"


def copies_folder(job: str) -> Path:
    """Where the ranks of a job on this host copy their state to. job: what names it, the same on every host."""
    return memory_folder() / f"{job_prefix(job)}-{host_name()}"


def job_prefix(job: str) -> str:
    """How the names of a job's folders begin on all hosts."""
    return f"autopar-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:12]}"


def identity_of(folder: Path) -> str:
    """What names the job of a folder of checkpoints, the same for all who ask, and another once the folder is new."""
    file = folder / _IDENTITY
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        new = folder / f"{_IDENTITY}.{uuid.uuid4().hex}"
        new.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(new, file)  # the first one stays
        new.unlink()
    return file.read_text()


def claim(folder: Path, *, lasting: bool) -> None:
    """Make the folder of a job that this process supervises, and remove those whose processes have all ended. lasting:
    it is of use to a later start of the job, so it is left if this process is killed."""
    for other in folder.parent.glob(f"autopar-{os.getuid()}-*"):
        owners = [path.name.removeprefix(_OWNER) for path in other.glob(f"{_OWNER}*")]
        if owners and other != folder and not any(Path(f"/proc/{pid}").exists() for pid in owners):
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not lasting:
        (folder / f"{_OWNER}{os.getpid()}").touch()


def _identity() -> str:
    found = socket.gethostname()
    with suppress(OSError):  # not on Linux
        found += Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    return found
