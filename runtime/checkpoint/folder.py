"""A run's checkpoints on disk.

    run/latest                      one line: step-00000003-5f0a3c11
    run/step-00000003-5f0a3c11/     .metadata and *.distcp as torch.distributed.checkpoint writes them: tensors
                                    state.pt: everything that is not a tensor shared by ranks
                                    manifest.json: the length and the checksums of all of these

A write goes to a new folder. Its manifest is the last file of it; then ``latest``, replaced by a rename, names it, and
what is older than the newest few is removed. A crash at any time leaves ``latest`` on a complete folder.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.manifest import MANIFEST, read_manifest

_LATEST = "latest"
_NAME = re.compile(r"step-\d+-[0-9a-f]{8}")


def new_name(step: int) -> str:
    """Name of the folder of a new write."""
    return f"step-{step:08d}-{uuid.uuid4().hex[:8]}"


def latest(path: Path) -> Path:
    """The folder of the latest complete checkpoint under ``path``. Raises CheckpointError."""
    try:
        content = (path / _LATEST).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} holds no checkpoint: cannot read {path / _LATEST} ({error.strerror}).\n"
            "  expected: a folder that autopar.save has written, on a file system that all ranks see"
        ) from error
    name = content[:-1].decode("ascii", "replace")
    if content[-1:] != b"\n" or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{path / _LATEST} is damaged: it holds {content[:80]!r}; expected one line, step-<number>-<id>"
        )
    if not (path / name).is_dir():
        raise CheckpointError(
            f"{path / _LATEST} names {name}, which is not there.\n"
            "  expected: a folder that autopar.save has written, on a file system that all ranks see"
        )
    return path / name


def complete(path: Path) -> dict[str, int]:
    """Name -> number of the checkpoints under ``path`` that have an undamaged manifest, the newest first."""
    found = {}
    for folder in _folders(path):
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            if manifest is not None:
                found[folder.name] = manifest.number
    return dict(sorted(found.items(), key=lambda pair: pair[1], reverse=True))


def newest_step(path: Path) -> int | None:
    """The steps of the newest checkpoint under ``path`` that has all its files, whose contents are not read; None where
    there is none."""
    return max((int(name.split("-")[1]) for name in complete(path)), default=None)


def has_checkpoint(path: Path) -> bool:
    """Whether there is something to resume from under ``path``, be it damaged; a write that was cut off is nothing."""
    return (path / _LATEST).exists() or any((folder / MANIFEST).exists() for folder in _folders(path))


def point_to(path: Path, name: str) -> None:
    """Have ``latest`` name the folder ``name``, in one step."""
    write_synced(path / f"{_LATEST}.new", f"{name}\n".encode())
    os.replace(path / f"{_LATEST}.new", path / _LATEST)
    sync_folder(path)


def remove_all_but(path: Path, names: Collection[str]) -> None:
    """Remove the checkpoints under ``path`` that have other names."""
    for folder in _folders(path):
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)


def remove_incomplete(path: Path) -> None:
    """Remove what writes have left that were cut off, which takes room. Only while nothing is written there."""
    named = None
    if (path / _LATEST).exists():
        try:
            named = latest(path).name
        except CheckpointError:
            return  # nobody knows which one without a manifest is complete
    for folder in _folders(path):
        if folder.name != named and not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and have it on disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk, as fsync of a file does not see to."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _folders(path: Path) -> list[Path]:
    return [folder for folder in path.iterdir() if _NAME.fullmatch(folder.name)] if path.is_dir() else []
