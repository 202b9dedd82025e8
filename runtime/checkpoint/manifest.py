"""The manifest of a checkpoint: which files it has, how long they are, and the checksums of their blocks.

    {"checkpoint": "step-00000003-5f0a3c11", "number": 7, "block_bytes": 67108864,
     "files": {".metadata": {"size": 1290, "crc32": ["0c1d7a52"]}, ...}, "crc32": "9be31f04"}

It is the last file that is written: a folder with one is complete. It names its folder, so that it is of use in no
other, and ends with a checksum of itself. number: each checkpoint has one more than those that were there before it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.checksums import BLOCK_BYTES, FileSums, block_sum, sums_of

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """checkpoint: name of the folder. number: place in the order of writing. files: by name."""

    checkpoint: str
    number: int
    files: dict[str, FileSums]

    def to_bytes(self) -> bytes:
        """The content of the file."""
        files = {
            one.name: {"size": one.size, "crc32": [f"{value:08x}" for value in one.sums]}
            for one in sorted(self.files.values(), key=lambda one: one.name)
        }
        return _sealed(
            {"checkpoint": self.checkpoint, "number": self.number, "block_bytes": BLOCK_BYTES, "files": files}
        )

    def blocks(self, besides: Iterable[str]) -> list[tuple[str, int]]:
        """(file, number of the block) of every block, without those of the files ``besides``."""
        left_out = set(besides)
        return [(one.name, n) for one in self.files.values() if one.name not in left_out for n in range(len(one.sums))]

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is there, neither shorter nor longer than it was written."""
        for one in self.files.values():
            file = folder / one.name
            try:
                size = file.stat().st_size
            except OSError as error:
                raise damaged(folder, f"{one.name} cannot be read ({error.strerror})") from error
            if size != one.size:
                raise damaged(folder, f"{one.name} has {size} bytes, expected {one.size}")

    def check_blocks(self, folder: Path, blocks: Iterable[tuple[str, int]]) -> None:
        """Raise CheckpointError unless each of these blocks is what was written."""
        for name, number in blocks:
            try:
                found = block_sum(folder / name, number)
            except OSError as error:
                raise damaged(folder, f"{name} cannot be read ({error.strerror})") from error
            if found != self.files[name].sums[number]:
                raise damaged(folder, _altered(self.files[name], number))

    def read(self, folder: Path, name: str) -> bytes:
        """The content of a file. Raises CheckpointError unless it is what was written."""
        if name not in self.files:
            raise damaged(folder, f"{MANIFEST} does not name {name}")
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise damaged(folder, f"{name} cannot be read ({error.strerror})") from error
        found, expected = sums_of(name, content), self.files[name]
        if found.size != expected.size:
            raise damaged(folder, f"{name} has {found.size} bytes, expected {expected.size}")
        for number, (one, other) in enumerate(zip(found.sums, expected.sums, strict=True)):
            if one != other:
                raise damaged(folder, _altered(expected, number))
        return content


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none. Raises CheckpointError if it is damaged, or of another one."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(folder, f"{MANIFEST} cannot be read ({error.strerror})") from error
    try:
        told = json.loads(content)
        told.pop("crc32")
        if _sealed(told) != content:
            raise ValueError("its checksum is another")
        if told["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"its blocks have {told['block_bytes']} bytes, expected {BLOCK_BYTES}")
        files = {
            name: FileSums(name, entry["size"], tuple(int(value, 16) for value in entry["crc32"]))
            for name, entry in told["files"].items()
        }
        manifest = Manifest(told["checkpoint"], told["number"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{MANIFEST} is not what was written: {error}") from error
    if manifest.checkpoint != folder.name:
        raise damaged(folder, f"{MANIFEST} is that of {manifest.checkpoint}")
    return manifest


def damaged(folder: Path, what: str) -> CheckpointError:
    """The error of a checkpoint that is not what was written."""
    return CheckpointError(f"the checkpoint {folder} is damaged: {what}")


def _altered(file: FileSums, number: int) -> str:
    last = min(file.size, (number + 1) * BLOCK_BYTES) - 1
    return f"{file.name} is not what was written, between its bytes {number * BLOCK_BYTES} and {last}"


def _sealed(content: dict[str, Any]) -> bytes:
    """JSON with its own checksum as the last entry."""
    value = zlib.crc32(json.dumps(content).encode())
    return (json.dumps(content | {"crc32": f"{value:08x}"}) + "\n").encode()
