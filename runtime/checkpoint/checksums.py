"""Checksums of files, block by block: computed as a file is written, compared by whoever reads a block.

CRC-32, as zlib has it: it is for damage by accident, and the fastest of its kind in Python's library (2.4 GB/s on a
core where SHA-256 does 1.5 and BLAKE2 0.6). Within a block, which is shorter than 512 MiB, it shows every change of one
or two bits, and every burst of up to 32; of anything else it misses one change in 4 billion.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 64 << 20
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileSums:
    """size: of the file, in bytes. sums: CRC-32 of every ``BLOCK_BYTES`` of it, the last block perhaps shorter."""

    name: str
    size: int
    sums: tuple[int, ...]


class RunningSums:
    """The checksums of what is added, piece by piece."""

    def __init__(self) -> None:
        self.size = 0
        self._sums: list[int] = []

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            begun = self.size % BLOCK_BYTES
            if not begun:
                self._sums.append(0)
            part, view = view[: BLOCK_BYTES - begun], view[BLOCK_BYTES - begun :]
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self.size += len(part)

    def of(self, name: str) -> FileSums:
        """The sums so far, as those of the file ``name``."""
        return FileSums(name, self.size, tuple(self._sums))


def sums_of(name: str, content: bytes) -> FileSums:
    """The checksums of a file with this content."""
    running = RunningSums()
    running.add(content)
    return running.of(name)


def block_sum(file: Path, number: int) -> int:
    """CRC-32 of block ``number`` of a file. Raises OSError."""
    found, left = 0, BLOCK_BYTES
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(file, "rb", buffering=0) as stream:
        stream.seek(number * BLOCK_BYTES)
        while left and (count := stream.readinto(buffer[:left])):
            found, left = zlib.crc32(buffer[:count], found), left - count
    return found
