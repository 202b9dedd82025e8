"""A folder of safetensors files: tensors that are read slice by slice, and written one after the other.

    model.safetensors                     everything, or
    model.safetensors.index.json          tensor -> file
    model-00001-of-00003.safetensors ...

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape and place), and
the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from autopar.ir.bounded_text import parse_json, read_text
from autopar.ir.errors import CheckpointError
from autopar.runtime.lazy_tensor import Box, LazyTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
# Of a model of a trillion parameters with an entry for each weight of each expert it has 15 MB.
_MAX_INDEX_BYTES = 32 << 20


class TensorFiles:
    """The tensors of a folder by name, each a LazyTensor. Files stay open until ``close``; nobody may change them.

    bytes_read: of all slices so far.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the headers. Raises CheckpointError if files are missing or broken."""
        self.folder, self.bytes_read = folder, 0
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, LazyTensor] = {}
        for file, names in self._files().items():
            handle = self._handle(file)
            held = set(handle.keys())
            absent = sorted(names - held) if names else []
            if absent:
                raise CheckpointError(f"{folder / file} does not hold {absent[0]}, which {INDEX} says is there")
            for name in sorted(names or held):
                self.tensors[name] = self._lazy(handle, name, file)

    def close(self) -> None:
        """After this nothing can be read."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def _files(self) -> dict[str, set[str]]:
        """File -> names of the tensors that are wanted of it (empty: all)."""
        if (self.folder / SINGLE).is_file():
            return {SINGLE: set()}
        index = self.folder / INDEX
        if not index.is_file():
            raise CheckpointError(
                f"{self.folder} has no weights that can be read in slices.\n  expected: {SINGLE}, or {INDEX} and the "
                "files that it names\n  try: save_pretrained of transformers, which writes them"
            )
        try:
            places = _read_index(index)["weight_map"]
            files: dict[str, set[str]] = {}
            for name, file in places.items():
                if Path(file).name != file:
                    raise ValueError(f"{file} is not the name of a file in this folder")
                files.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is broken: {error!r}\n  expected: weight_map, tensor -> file") from error
        return files

    def _handle(self, file: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise CheckpointError(
                "reading weights needs safetensors.\n  try: pip install 'autopar[safetensors]'"
            ) from error
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {self.folder / file}: {error}") from error
        return self._open[file]

    def _lazy(self, handle: Any, name: str, file: str) -> LazyTensor:
        entry = handle.get_slice(name)
        dtype = _DTYPES.get(entry.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{self.folder / file}: {name} has dtype {entry.get_dtype()}, which is not read")

        def fetch(box: Box) -> torch.Tensor:
            count = 1
            for _, length in box:
                count *= length
            if count == 0:
                return torch.empty([length for _, length in box], dtype=dtype)
            self.bytes_read += count * dtype.itemsize
            if not box:
                value: torch.Tensor = handle.get_tensor(name)
                return value
            sliced: torch.Tensor = entry[tuple(slice(start, start + length) for start, length in box)]
            return sliced

        return LazyTensor(entry.get_shape(), dtype, fetch)


class TensorFileWriter:
    """One file, its tensors written in the order in which they are listed."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: whose shapes and dtypes count. Raises CheckpointError for a dtype that the format has not."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, value in tensors.items():
            if value.dtype not in _NAMES:
                raise CheckpointError(f"{name} has dtype {value.dtype}, which safetensors does not store")
            stop = start + nbytes(value)
            header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, value: torch.Tensor) -> None:
        """The next tensor, on the CPU."""
        self._file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Have it on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _read_index(path: Path) -> Any:
    text = read_text(path, "index", CheckpointError, max_bytes=_MAX_INDEX_BYTES)
    return parse_json(text, str(path), CheckpointError, max_bytes=_MAX_INDEX_BYTES)


def nbytes(value: torch.Tensor) -> int:
    """Bytes that the elements of a tensor take."""
    return value.numel() * value.dtype.itemsize
