"""Tensors in a file, at the same addresses whether they are in memory or not.

    tensors        | weight            | bias |      at these addresses is
    in memory      private memory                    after ``read``, and at first
    on disk        the file, mapped                  after ``write`` and ``drop``

Moving whole files past the page cache, in large pieces, is for speed, for checksums, and so that an error of the disk
is an OSError. Whoever touches a tensor that is on disk all the same gets its values, as the file is mapped there, and
what is stored into it reaches the file. While a file is on its way reads are right, and a store into its tensors ends
the process with SIGSEGV instead of being lost. ``drop`` writes what has changed since the file was read or written.

The system notes the time of the last change of a file, also of one by memory. ``write`` sets it to a time long ago:
what is read while it still says so is what was written, and its checksum has to be the same.

The file has no name, so it ends with the process, and all of its room is taken when it is made, so that a disk that
fills up later does not matter.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from autopar.runtime.disk.mapping import (
    READ,
    READ_WRITE,
    bytes_at,
    free_memory,
    map_file,
    move_memory,
    new_memory,
    protect,
)

# In one call of the system.
_PIECE_BYTES = 16 << 20
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
    """A file of tensors. One thread at a time reads, writes or drops it."""

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
        self._past_cache = _goes_past_cache(self._descriptor)
        # Frees what is at its addresses, whatever that is then, when the last tensor is gone.
        self._addresses = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._start = torch.frombuffer(self._addresses, dtype=torch.uint8).data_ptr()
        self._in_memory = True
        self._at = dict(zip((layout.name for layout in layouts), starts, strict=True))
        self.tensors = {layout.name: self._tensor(layout) for layout in layouts}
        """By name. Zeros at first, in memory."""
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
        flat = torch.frombuffer(self._addresses, dtype=layout.dtype, count=numel, offset=start)
        return flat.view(layout.shape)

    def holds(self, layouts: Sequence[TensorLayout]) -> bool:
        """Whether the file is of just these tensors."""
        return tuple(layouts) == self._layouts

    def take(self) -> None:
        """Have the tensors in memory, with any values: all of them are to be replaced."""
        if not self._in_memory:
            move_memory(new_memory(self.num_bytes), self._start, self.num_bytes)
            self._in_memory = True

    def read(self) -> int:
        """Bring all of it to memory, and compare it with its checksums; how many bytes. Raises OSError."""
        if self._in_memory:
            return 0
        with self._closed_to_stores():
            self._read()
        return self.num_bytes

    def _read(self) -> None:
        memory = new_memory(self.num_bytes)
        try:
            done = 0
            while done < self.num_bytes:
                piece = bytes_at(memory + done, min(_PIECE_BYTES, self.num_bytes - done))
                count = os.preadv(self._descriptor, [piece], done)
                if not count:
                    raise OSError(errno.EIO, f"the file of {self._layouts[0].name} ends early")
                done += count
            sums = self._sums_at(memory)
            if self._is_as_written():
                for name, found in sums.items():
                    if self._sums.get(name, found) != found:
                        raise OSError(errno.EIO, f"{name} is not what was written: its checksum differs")
            self._sums = sums
        except BaseException:
            free_memory(memory, self.num_bytes)
            raise
        move_memory(memory, self._start, self.num_bytes)
        self._in_memory = True

    def write(self) -> int:
        """Bring all of it to the disk, with its checksums, and free its memory; how many bytes. Raises OSError."""
        if not self._in_memory:
            return 0
        with self._closed_to_stores():
            self._sums = self._sums_at(self._start)
            self._write()
        return self.num_bytes

    def drop(self) -> int:
        """Free the memory of what is on the disk, and write it if it is not; how many bytes. Raises OSError."""
        if not self._in_memory:
            return 0
        with self._closed_to_stores():
            sums = self._sums_at(self._start)
            if sums != self._sums:
                self._sums = sums
                self._write()
                return self.num_bytes
            self._leave()
            return 0

    def flush(self) -> None:
        """Bring what has been stored into tensors on disk there, and free its memory. Raises OSError."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write(self) -> None:
        done = 0
        while done < self.num_bytes:
            piece = bytes_at(self._start + done, min(_PIECE_BYTES, self.num_bytes - done))
            done += os.pwritev(self._descriptor, [piece], done)
        if not self._past_cache:
            os.fdatasync(self._descriptor)
        os.utime(self._descriptor, ns=(_LONG_AGO, _LONG_AGO))
        self._leave()

    @contextmanager
    def _closed_to_stores(self) -> Iterator[None]:
        """Until the tensors are somewhere else, or an error has left them where they are."""
        protect(self._start, self.num_bytes, READ)
        try:
            yield
        except BaseException:
            protect(self._start, self.num_bytes, READ_WRITE)
            raise

    def _leave(self) -> None:
        map_file(self._start, self.num_bytes, self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._in_memory = False

    def _sums_at(self, address: int) -> dict[str, int]:
        return {
            layout.name: xxhash.xxh3_64_intdigest(bytes_at(address + self._at[layout.name], layout.num_bytes))
            for layout in self._layouts
            if layout.num_bytes
        }

    def _is_as_written(self) -> bool:
        """Whether nothing has changed the file in memory since it was written."""
        return os.fstat(self._descriptor).st_mtime_ns == _LONG_AGO


def _goes_past_cache(descriptor: int) -> bool:
    """Have a file read and written past the page cache; whether its file system can."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
