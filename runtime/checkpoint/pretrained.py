"""Writing a model as a folder that other libraries read: whole tensors in safetensors files, and a config.

Tensors are gathered and written one after the other, so that no rank ever holds more than one of them whole. What a
folder held stays until all files of the new checkpoint are complete beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from autopar.ir.errors import CheckpointError, InvalidInput
from autopar.runtime.agreement import agree
from autopar.runtime.checkpoint.safetensors_files import INDEX, SINGLE, TensorFileWriter, nbytes
from autopar.runtime.engine import Engine
from autopar.runtime.lazy_tensor import LazyTensor
from autopar.runtime.whole import whole_tensors

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class PretrainedFolder(Protocol):
    """How a library keeps a model in a folder."""

    def save(self, engine: Engine, path: str | os.PathLike[str], max_shard_size: int | str) -> None:
        """Write the folder ``path``. All ranks call together."""
        ...


class PretrainedFormat(Protocol):
    """How a library wants a model's checkpoint, if that holds the whole model."""

    def file_tensors(self, tensors: Mapping[str, LazyTensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of the files by their names there, out of those of the model's state dict.

        Tied parameters come under all of their names, as the same object. Nothing may be read here.
        """
        ...

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write everything but tensors."""
        ...


def save_pretrained(
    engine: Engine, form: PretrainedFormat, path: str | os.PathLike[str], max_shard_size: int | str
) -> None:
    """Write the folder ``path``. All ranks call together; rank 0 writes. See ``ParallelModule.save_pretrained``."""
    folder, limit = Path(path), parse_size(max_shard_size)
    tensors = whole_tensors(engine)
    found = agree(lambda: dict(form.file_tensors(tensors)))
    files = split(found, limit)
    writer = _Writer(folder, files) if dist.get_rank() == 0 else None
    agree(lambda: None if writer is None else writer.begin())
    try:
        # Reading gathers, so every rank reads everything, whatever happens to the one that writes.
        for file, values in files.items():
            if writer is not None:
                writer.open(file)
            for value in values.values():
                whole = value.read() if isinstance(value, LazyTensor) else value
                if writer is not None:
                    writer.write(whole)
                del whole
        dtype = next((v.dtype for v in found.values() if v.is_floating_point()), torch.float32)
        agree(lambda: None if writer is None else writer.finish(form, dtype))
    finally:
        if writer is not None:
            writer.clean_up()


def parse_size(size: int | str) -> int:
    """Bytes: a number, or one with a unit, as ``"5GB"``. Raises InvalidInput."""
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", str(size).strip().upper())
    if match is None or float(match[1]) <= 0:
        raise InvalidInput(f"max_shard_size: {size!r}; expected bytes, or a string such as '500MB' or '5GB'")
    return int(float(match[1]) * _UNITS[match[2]])


def split(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, dict[str, torch.Tensor]]:
    """File -> its tensors, at most ``limit`` bytes a file unless one tensor alone has more."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if parts[-1] and size + nbytes(value) > limit:
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += nbytes(value)
    # Wide elements first: they are then aligned in the file.
    parts = [dict(sorted(part.items(), key=lambda item: -item[1].dtype.itemsize)) for part in parts]
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


class _Writer:
    """Writes files into a folder inside the one that is wanted, and moves them there in the end.

    The first failure is kept until ``finish`` and ends all writing.
    """

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._folder, self._files = folder, files
        self._temporary = folder / f".saving-{uuid.uuid4().hex[:8]}"
        self._file: TensorFileWriter | None = None
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Make the temporary folder. Raises CheckpointError."""
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise self._failed(error) from error

    def open(self, file: str) -> None:
        """Go on with the next file."""
        self._try(lambda: self._open(file))

    def write(self, value: torch.Tensor) -> None:
        """The next tensor of the file."""
        self._try(lambda: None if self._file is None else self._file.write(value))

    def finish(self, form: PretrainedFormat, dtype: torch.dtype) -> None:
        """Move everything into place. Raises CheckpointError for what has gone wrong since ``begin``."""
        self._try(lambda: self._close(form, dtype))
        self.clean_up()
        if self._failure is not None:
            raise self._failed(self._failure) from self._failure

    def clean_up(self) -> None:
        """Remove what is not in place."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _try(self, work: Callable[[], object]) -> None:
        if self._failure is None:
            try:
                work()
            except Exception as error:
                self._failure = error

    def _failed(self, error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"writing {self._folder} failed: {error}\n  what the folder held is still there")

    def _open(self, file: str) -> None:
        if self._file is not None:
            self._file.close()
        self._file = TensorFileWriter(self._temporary / file, self._files[file])

    def _close(self, form: PretrainedFormat, dtype: torch.dtype) -> None:
        if self._file is not None:
            self._file.close()
        if len(self._files) > 1:
            self._write_index()
        form.write_config(self._temporary, dtype)
        # Tensors first, then what says where they are; what both replace comes last.
        new = sorted(os.listdir(self._temporary), key=lambda name: (not _SHARD.fullmatch(name), name))
        for name in new:
            os.replace(self._temporary / name, self._folder / name)
        for name in os.listdir(self._folder):
            if name not in new and (name in (SINGLE, INDEX) or _SHARD.fullmatch(name)):
                os.remove(self._folder / name)

    def _write_index(self) -> None:
        values = [value for part in self._files.values() for value in part.values()]
        index = {
            "metadata": {
                "total_parameters": sum(value.numel() for value in values),
                "total_size": sum(map(nbytes, values)),
            },
            "weight_map": {name: file for file, part in self._files.items() for name in part},
        }
        (self._temporary / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def kept_names(tied: Iterable[tuple[str, ...]], given_up: Iterable[str]) -> set[str]:
    """The name to write for each group of names of one tensor: the first that is not among ``given_up``, if any."""
    others = set(given_up)
    return {next((name for name in names if name not in others), names[0]) for names in tied}
