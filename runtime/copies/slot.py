"""One copy of one rank's state: a file in memory that outlives the process that writes it.

     0  magic               8 bytes
     8  step                of which the copy is; -1 while it is being written
    16  rank, world size    of the plan that it was made under
    32  lengths             of the header, of the values, of the room for values, of the whole file
    64  beginning           its length, and the rank that has what comes after it too
    80  header              JSON: what is the same in every step, and where each tensor is
        values              what is not a tensor, as ``torch.save`` writes it
        tensors             one after the other, last those that come after the beginning

A copy counts once its step is written, which is the last thing that is. The beginning alone is a copy too, beside one
of that rank.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.ir.errors import CheckpointError

BODY = 16
"""Where the bytes begin that do not say whether the copy is complete."""

_MAGIC = b"autopar2"
_PREFIX = struct.Struct("<8sqqqqqqqqq")
_ALIGNMENT = 64
_NONE = -1  # no step yet, no rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor that a rank holds. key: of the tensor in checkpoints; shape: of all of it; offsets, sizes: of
    the part in it; start: the first byte of the part among the tensors of the slot."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of its elements."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"a copy in memory is broken: {self.key} has dtype {self.dtype!r}")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        count = 1
        for size in self.sizes:
            count *= size
        return count * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Those of a rank, in order. nbytes: of all, each at its place. beginning: of those before the ones that ``rest``,
    another rank, has too."""

    all: Sequence[Piece]
    nbytes: int
    beginning: int
    rest: int | None = None


Part = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""What a piece is of the state, wherever it lies in a slot: the fields of Piece up to ``start``."""


def part_of(key: str, tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Part:
    """tensor: this rank's part of one with this key and shape, in which it begins at ``offsets``."""
    return key, str(tensor.dtype).removeprefix("torch."), tuple(shape), tuple(offsets), tuple(tensor.shape)


def placed(own: Sequence[Part], rest: int | None = None, shared: Container[Part] = ()) -> Pieces:
    """The pieces of these parts, in that order. shared: the parts that rank ``rest`` has too, which come last."""
    first, last = [part for part in own if part not in shared], [part for part in own if part in shared]
    pieces, start, ends = [], 0, [0]
    for key, dtype, shape, offsets, sizes in first + last:
        pieces.append(Piece(key=key, dtype=dtype, shape=shape, offsets=offsets, sizes=sizes, start=start))
        start = _aligned(start + pieces[-1].nbytes)
        ends.append(start)
    return Pieces(all=pieces, nbytes=start, beginning=ends[len(first)], rest=rest if last else None)


class Slot:
    """A file that holds a copy, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that is none."""
        self.path = path
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
            magic, _, self.rank, self.world_size, header, _, room, size, beginning, _ = _PREFIX.unpack_from(self._map)
            if magic != _MAGIC or len(self._map) not in (size, beginning):
                raise ValueError("it is no copy of a state")
            self.header: dict[str, Any] = json.loads(self._map[_PREFIX.size : _PREFIX.size + header])
            self._values_at, self._room = _PREFIX.size + header, room
            self._tensors_at = _aligned(self._values_at + room)
            pieces = [_piece(fields) for fields in self.header.pop("pieces")]
        except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is broken: {error}") from error
        self.pieces = [piece for piece in pieces if self._tensors_at + piece.start + piece.nbytes <= len(self._map)]
        self._beginning = beginning
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], pieces: Pieces, room: int, rank: int, size: int) -> Slot:
        """An empty one. header: what is JSON and the same in every step. room: for values, in bytes."""
        text = json.dumps({**header, "pieces": [_fields(piece) for piece in pieces.all]}).encode()
        tensors_at = _aligned(_PREFIX.size + len(text) + room)
        beginning, total = tensors_at + max(pieces.beginning, _ALIGNMENT), tensors_at + max(pieces.nbytes, _ALIGNMENT)
        rest = _NONE if pieces.rest is None else pieces.rest
        new = path.with_suffix(f"{path.suffix}.new")
        with open(new, "wb") as file:
            lengths = len(text), 0, room, total, beginning
            file.write(_PREFIX.pack(_MAGIC, _NONE, rank, size, *lengths, rest) + text)
            # Room that memory does not have ends a process when it writes there; here it is an error.
            os.posix_fallocate(file.fileno(), 0, total)
        os.replace(new, path)
        return cls(path)

    @classmethod
    def empty(cls, path: Path, total: int) -> torch.Tensor:
        """The bytes of a new file whose body another process sends."""
        new = path.with_suffix(f"{path.suffix}.new")
        with open(new, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, total)
            file.write(_PREFIX.pack(_MAGIC, *[_NONE] * 9))
            file.flush()
            mapped = mmap.mmap(file.fileno(), total)
        os.replace(new, path)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    @property
    def step(self) -> int | None:
        """The step that the copy is of; None where it is not complete."""
        step = struct.unpack_from("<q", self._map, 8)[0]
        return None if step < 0 else step

    @property
    def data(self) -> torch.Tensor:
        """All of the file."""
        return self._bytes

    @property
    def beginning(self) -> torch.Tensor:
        """The file without what another rank has too."""
        return self._bytes[: self._beginning]

    def tensor(self, piece: Piece) -> torch.Tensor:
        """The place of a piece, which writes go to."""
        start = self._tensors_at + piece.start
        return self._bytes[start : start + piece.nbytes].view(piece.torch_dtype).view(piece.sizes)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The places of all pieces."""
        return [self.tensor(piece) for piece in self.pieces]

    def begin(self) -> None:
        """The copy is not complete from here to ``finish``."""
        set_step(self._bytes, _NONE)

    def finish(self, step: int, values: bytes) -> None:
        """It is complete, and of ``step``. There must be room for the values."""
        assert len(values) <= self._room, "the slot was made with room for them"
        self._map[self._values_at : self._values_at + len(values)] = values
        struct.pack_into("<q", self._map, 40, len(values))
        set_step(self._bytes, step)

    @property
    def values(self) -> bytes:
        """What ``finish`` was given."""
        length = struct.unpack_from("<q", self._map, 40)[0]
        return self._map[self._values_at : self._values_at + length]


def set_step(data: torch.Tensor, step: int) -> None:
    """Write the step of a copy, whose bytes ``data`` are."""
    data[8:16].view(torch.int64).fill_(step)


class Seen(NamedTuple):
    """What the first bytes of a complete copy say. rest: the rank whose own copy has the tensors after the
    beginning, where the file is the beginning alone; else None."""

    step: int
    rank: int
    world_size: int
    rest: int | None


def peek(path: Path) -> Seen | None:
    """A complete copy without reading it; None where there is none."""
    try:
        with open(path, "rb") as file:
            magic, step, rank, size, *_, total, _, rest = _PREFIX.unpack(file.read(_PREFIX.size))
            whole = os.fstat(file.fileno()).st_size == total
    except (OSError, struct.error):
        return None
    return None if magic != _MAGIC or step < 0 else Seen(step, rank, size, None if whole else rest)


def _fields(piece: Piece) -> dict[str, Any]:
    return {name: getattr(piece, name) for name in ("key", "dtype", "shape", "offsets", "sizes", "start")}


def _piece(fields: dict[str, Any]) -> Piece:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Piece(**given)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
