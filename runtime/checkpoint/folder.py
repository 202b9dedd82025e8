"""A checkpoint on disk.

    run/latest                      one line: step-00000003-5f0a3c11
    run/step-00000003-5f0a3c11/     .metadata and *.distcp as torch.distributed.checkpoint writes them: tensors
                                    state.pt: everything that is not a tensor shared by ranks

A write goes to a new folder. It counts once ``latest``, replaced by a rename after all files are on disk, names
it; then what it replaces is removed. A crash at any time leaves ``latest`` on a complete folder.

Reading executes no code from the files: tensors and ``state.pt`` are loaded with ``weights_only``, and the pickle
that torch.distributed.checkpoint writes as ``.metadata`` is read by an unpickler that knows its classes alone.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Sequence
from enum import EnumMeta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.saved import Saved
from autopar.runtime.torch_private import checkpoint_classes

_LATEST, _STATE = "latest", "state.pt"
_NAME = re.compile(r"step-\d+-[0-9a-f]{8}")


def new_name(step: int) -> str:
    """Name of the folder of a new write."""
    return f"step-{step:08d}-{uuid.uuid4().hex[:8]}"


class AtomicWriter(FileSystemWriter):
    """Writes into the folder ``name`` of ``path``; the last thing it does is to make it the latest."""

    def __init__(self, path: Path, name: str, state: bytes) -> None:
        """state: what ``state.pt`` is to hold."""
        super().__init__(path / name)
        self._run, self._name, self._state = path, name, state

    def storage_meta(self) -> StorageMeta:
        """Metadata of the write: its id alone."""
        # Without the path, which is nobody's business in a file that may be moved.
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the coordinator, after all ranks have written their files."""
        super().finish(metadata, results)
        folder = self._run / self._name
        _write_synced(folder / _STATE, self._state)
        _sync_folder(folder)
        _sync_folder(self._run)
        _write_synced(self._run / f"{_LATEST}.new", f"{self._name}\n".encode())
        os.replace(self._run / f"{_LATEST}.new", self._run / _LATEST)
        _sync_folder(self._run)
        for other in self._run.iterdir():
            if _NAME.fullmatch(other.name) and other.name != self._name:
                shutil.rmtree(other, ignore_errors=True)


class SafeReader(FileSystemReader):
    """Reads the metadata without executing what a pickle may ask for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata. Raises CheckpointError if it is incomplete."""
        return read_metadata(Path(self.path))


def latest(path: Path) -> Path:
    """The folder of the latest complete checkpoint under ``path``. Raises CheckpointError."""
    try:
        name = (path / _LATEST).read_text().strip()
    except OSError as error:
        raise CheckpointError(
            f"{path} holds no checkpoint: cannot read {path / _LATEST} ({error.strerror}).\n"
            "  expected: a folder that autopar.save has written, on a file system that all ranks see"
        ) from error
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{path / _LATEST} is broken: it names {name[:80]!r}; expected step-<number>-<id>")
    return path / name


def open_saved(path: Path) -> Saved:
    """The latest complete checkpoint under ``path``. Raises CheckpointError."""
    folder = latest(path)
    state, metadata = read_state(folder), read_metadata(folder)
    return Saved(
        where=str(folder),
        state=state,
        metadata=metadata,
        reader=partial(SafeReader, folder),
        check=partial(check_files, folder, metadata),
    )


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of ``state.pt``. Raises CheckpointError."""
    try:
        state: dict[str, Any] = torch.load(folder / _STATE, weights_only=True)
    except Exception as error:
        raise _broken(folder / _STATE, error) from error
    return state


def state_bytes(state: dict[str, Any]) -> bytes:
    """The content of ``state.pt``. Raises CheckpointError, naming the entry, for what could not be loaded again."""
    for key, value in state.items():
        try:
            torch.load(io.BytesIO(_saved(value)), weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{key} cannot be saved: {error}\n"
                "  expected: numbers, strings, tensors, and lists, tuples and dictionaries of them"
            ) from error
    return _saved(state)


def read_metadata(folder: Path) -> Metadata:
    """The tensors of the checkpoint and their places. Raises CheckpointError if it is broken."""
    try:
        with open(folder / ".metadata", "rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:
        raise _broken(folder / ".metadata", error) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{folder / '.metadata'} is broken: it is not the metadata of a checkpoint")
    return found


def check_files(folder: Path, metadata: Metadata, names: Sequence[str]) -> None:
    """Raise CheckpointError unless the files that hold ``names`` are there in full length."""
    for name in names:
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            where = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if where is None or Path(where.relative_path).name != where.relative_path:
                raise CheckpointError(f"{folder / '.metadata'} is broken: it does not say where {name} is")
            file = folder / where.relative_path
            size = file.stat().st_size if file.exists() else -1
            if size < where.offset + where.length:
                found = "is missing" if size < 0 else f"has {size} bytes, expected {where.offset + where.length}"
                raise CheckpointError(
                    f"the checkpoint {folder} is broken: {file.name}, which holds {name}, {found}.\n"
                    "  try: a file system that all ranks see, or an earlier checkpoint"
                )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = checkpoint_classes().get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None and (module, name) == ("builtins", "getattr"):
            found = _member  # how early Python 3.11 pickles a member of an enum
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of autopar does")
        return found


def _member(kind: Any, name: str) -> Any:
    """``getattr`` for members of an enum and nothing else."""
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"it reads {name!r} of {kind!r}, which is no enum")
    return kind[name]


def _broken(file: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"the checkpoint is broken: cannot read {file}: {error}\n  try: an earlier checkpoint")


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on disk, as fsync of a file does not see to."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
