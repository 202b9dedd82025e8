"""What is in the files of a checkpoint, read without executing code from them.

Tensors and ``state.pt`` are loaded with ``weights_only``, and the pickle that torch.distributed.checkpoint writes as
``.metadata`` is read by an unpickler that knows its classes alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.manifest import damaged
from autopar.runtime.checkpoint.untrusted_files import check_archive, check_pickle
from autopar.runtime.torch_private import checkpoint_classes

STATE, METADATA = "state.pt", ".metadata"


class SafeReader(FileSystemReader):
    """Reads tensors under metadata that has been read already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        return self._metadata


def parse_state(content: bytes, folder: Path) -> dict[str, Any]:
    """What ``state.pt`` holds. Raises CheckpointError."""
    try:
        check_archive(content)
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise damaged(folder, f"cannot read {STATE}: {error}") from error
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


def parse_metadata(content: bytes, folder: Path) -> Metadata:
    """The tensors of the checkpoint and their places. Raises CheckpointError if it is damaged."""
    try:
        check_pickle(content)
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise damaged(folder, f"cannot read {METADATA}: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise damaged(folder, f"{METADATA} is not the metadata of a checkpoint")
    return found


def check_places(folder: Path, metadata: Metadata, names: Sequence[str]) -> None:
    """Raise CheckpointError unless the files that hold ``names`` are there, and as long as that takes."""
    for name in names:
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            where = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if where is None or Path(where.relative_path).name != where.relative_path:
                raise damaged(folder, f"{METADATA} does not say where {name} is")
            file = folder / where.relative_path
            size = file.stat().st_size if file.exists() else -1
            if size < where.offset + where.length:
                found = "is missing" if size < 0 else f"has {size} bytes, expected {where.offset + where.length}"
                raise CheckpointError(
                    f"{damaged(folder, f'{file.name}, which holds {name}, {found}')}.\n"
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


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
