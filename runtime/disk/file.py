"""Tensors in a file that is mapped into memory.

    address space     | weight            | bias |        tensors as any others
    page cache        | pages that are in use, or are on their way
    file              | weight            | bias |        aligned to pages

Whoever reads a tensor gets its pages, from the disk if they are not in memory; when memory runs short the system writes
changed pages back and takes them. So it is always right to use such a tensor, and ``read`` and ``write`` are there for
speed, for checksums, and so that an error of the disk is an OSError: a page that cannot be read when it is touched ends
the process with SIGBUS.

The system notes the time of the last change of a file, also of one by memory. ``write`` sets it to a time long ago:
what is read while it still says so is what was written, and its checksum has to be the same.

The file has no name, so it ends with the process, and all of its room is taken when it is made, so that a disk that
fills up later does not matter.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

# In one call of the system.
_PIECE_BYTES = 4 << 20
_MOST_WRITTEN = 1 << 30
# In nanoseconds: a time of no change.
_LONG_AGO = 10**9


class TensorLayout(NamedTuple):
    """A tensor of a file, on this rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Without what fills its last page up."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """A file of tensors. Its threads read and write it in turns; who uses its tensors meanwhile sees their values."""

    def __init__(self, folder: Path, layouts: Sequence[TensorLayout]) -> None:
        """folder: of a file system on a disk. Raises OSError, as ENOSPC where it has no room."""
        page = mmap.PAGESIZE
        ends = list(accumulate(-(-max(1, layout.num_bytes) // page) * page for layout in layouts))
        starts = [0, *ends[:-1]]
        self.num_bytes = ends[-1] if ends else page
        self._layouts = tuple(layouts)
        with tempfile.TemporaryFile(dir=folder, prefix="autopar-", buffering=0) as file:
            self._descriptor = os.dup(file.fileno())
        os.posix_fallocate(self._descriptor, 0, self.num_bytes)
        self._memory = mmap.mmap(self._descriptor, self.num_bytes)
        self._at = dict(zip((layout.name for layout in layouts), starts, strict=True))
        self.tensors = {layout.name: self._tensor(layout) for layout in layouts}
        """By name. Zeros at first."""
        self._sums: dict[str, int] = {}

    def __del__(self) -> None:
        # Tensors, which may outlive this, keep what is mapped.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _tensor(self, layout: TensorLayout) -> torch.Tensor:
        numel = torch.Size(layout.shape).numel()
        if not numel:
            return torch.empty(layout.shape, dtype=layout.dtype)
        start = self._at[layout.name]
        flat = torch.frombuffer(self._memory, dtype=layout.dtype, count=numel, offset=start)
        return flat.view(layout.shape)

    def holds(self, layouts: Sequence[TensorLayout]) -> bool:
        """Whether the file is of just these tensors."""
        return tuple(layouts) == self._layouts

    def put(self, name: str, value: torch.Tensor) -> None:
        """Give a tensor the elements of another, and do not read what it had. Raises OSError."""
        if value.numel():
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            offset = self._at[name]
            while len(data):
                done = os.pwrite(self._descriptor, data[:_MOST_WRITTEN], offset)
                data, offset = data[done:], offset + done

    def read(self) -> int:
        """Bring all of it to memory, and compare it with its checksums; how many bytes. Raises OSError."""
        buffer = memoryview(bytearray(min(_PIECE_BYTES, self.num_bytes)))
        for layout in self._layouts:
            crc, (start, end) = 0, self._place(layout)
            for offset in range(start, end, _PIECE_BYTES):
                wanted = buffer[: min(_PIECE_BYTES, end - offset)]
                if os.preadv(self._descriptor, [wanted], offset) < len(wanted):
                    raise OSError(errno.EIO, f"the file of {layout.name} ends early")
                crc = zlib.crc32(wanted, crc)
            if self._sums.get(layout.name, crc) != crc and self._is_as_written():
                raise OSError(errno.EIO, f"{layout.name} is not what was written: its checksum differs")
        return self.num_bytes

    def flush(self) -> None:
        """Bring all that has changed to the disk. Raises OSError."""
        os.fdatasync(self._descriptor)

    def write(self) -> int:
        """Bring all that has changed to the disk, and take its checksums; how many bytes there are. Raises OSError."""
        self.flush()
        os.utime(self._descriptor, ns=(_LONG_AGO, _LONG_AGO))
        # Of what has changed between the two, which the time does not tell.
        self.flush()
        whole = memoryview(self._memory)
        for layout in self._layouts:
            crc, (start, end) = 0, self._place(layout)
            for offset in range(start, end, _PIECE_BYTES):
                crc = zlib.crc32(whole[offset : min(offset + _PIECE_BYTES, end)], crc)
            self._sums[layout.name] = crc
        return self.num_bytes

    def _place(self, layout: TensorLayout) -> tuple[int, int]:
        start = self._at[layout.name]
        return start, start + layout.num_bytes

    def _is_as_written(self) -> bool:
        """Whether nothing has changed the file in memory since it was written."""
        return os.fstat(self._descriptor).st_mtime_ns == _LONG_AGO

    def drop(self) -> None:
        """Give back the memory of pages that are on the disk; they are read when they are used."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
