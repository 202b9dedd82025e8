"""Tokens in files, read where they are needed.

    stdlib              the source of Python's own standard library, byte by byte
    book.txt, src/      text: every byte is a token; a folder's files one after the other, binary ones left out
    tokens.npy          an array of integers (of several dimensions: row after row)
    tokens.bin          integers one after the other, of a dtype that the user names
    tokens/, 'a/*.npy'  several of those, in the order of their names

Nothing is unpickled. Files are mapped into memory, so a corpus may be larger than it.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.errors import InvalidInput

STDLIB = "stdlib"
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_ARRAYS = (".npy", ".bin")
# A file with a zero byte among the first is not text.
_PROBE_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The tokens of one file. name: of the file within the corpus. offset_bytes: where they begin in it."""

    path: str
    name: str
    dtype: str
    offset_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class Corpus:
    """Pieces one after the other. where: as the user named it."""

    where: str
    pieces: tuple[Piece, ...]

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(piece.num_tokens for piece in self.pieces)]

    @cached_property
    def digest(self) -> str:
        """Digest of the names and lengths of its files, equal when a run is resumed and on every machine."""
        listed = "\n".join(f"{piece.name} {piece.dtype} {piece.num_tokens}" for piece in self.pieces)
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        files = "1 file" if len(self.pieces) == 1 else f"{len(self.pieces):,} files"
        return f"{self.where}: {len(self):,} tokens in {files}"

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens ``start`` to ``start + count``. Raises InvalidInput if a file has changed meanwhile."""
        found = np.empty(count, np.int64)
        filled, number = 0, bisect_right(self._starts, start) - 1
        while filled < count:
            piece = self.pieces[number]
            first = start + filled - self._starts[number]
            taken = min(count - filled, piece.num_tokens - first)
            found[filled : filled + taken] = _mapped(piece)[first : first + taken]
            filled, number = filled + taken, number + 1
        return found


def open_corpus(where: str, dtype: str = "uint16") -> Corpus:
    """The corpus that ``--data`` names. dtype: of the integers in ``.bin`` files. Raises InvalidInput."""
    if dtype not in TOKEN_DTYPES:
        raise InvalidInput(f"--token-dtype {dtype}: expected one of {', '.join(TOKEN_DTYPES)}")
    try:
        files = list(_files(where))
    except (OSError, ValueError) as error:  # a name that is too long, or no name
        raise InvalidInput(f"--data {where[:200]!r}: {error!s:.300}") from error
    arrays = [(path, name) for path, name in files if path.suffix in _ARRAYS]
    if arrays and len(arrays) < len(files):
        other = next(name for path, name in files if path.suffix not in _ARRAYS)
        raise InvalidInput(
            f"--data {where}: has arrays of tokens ({arrays[0][1]}) beside other files ({other}).\n"
            f"  expected: the one or the other\n  try: --data '{where.rstrip('/')}/*{arrays[0][0].suffix}'"
        )
    single = len(files) == 1
    try:
        found = [_array(p, n, dtype) for p, n in arrays] if arrays else [_text(p, n, single) for p, n in files]
    except OSError as error:
        raise InvalidInput(f"--data {where}: {error}") from error
    pieces = tuple(piece for piece in found if piece is not None and piece.num_tokens)
    if not pieces:
        raise InvalidInput(
            f"--data {where}: there are no tokens in it.\n"
            f"  expected: text, or arrays of integers ({', '.join(_ARRAYS)}); files that begin with a dot are left out"
        )
    return Corpus(where, pieces)


def _files(where: str) -> Iterator[tuple[Path, str]]:
    """(path, name) of the files of a corpus, in the order of their names."""
    path = Path(where)
    if where == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = ("site-packages", "dist-packages")
        yield from (found for found in _within(root, "*.py") if not any(part in found[1] for part in skipped))
    elif path.is_dir():
        yield from _within(path, "*")
    elif path.is_file():
        yield path, path.name
    elif matches := sorted(glob.glob(where)):
        yield from ((Path(match), match) for match in matches if Path(match).is_file())
    else:
        raise InvalidInput(
            f"--data {where}: there is no such file or folder.\n"
            f"  expected: a text file, a folder of them, arrays of tokens ({', '.join(_ARRAYS)}), or {STDLIB}, the "
            "source of Python's standard library"
        )


def _within(root: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    named = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob(pattern))
    for name, path in named:
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            yield path, name


def _text(path: Path, name: str, single: bool) -> Piece | None:
    """None for a binary file, unless it is the only one."""
    with path.open("rb") as file:
        if b"\0" in file.read(_PROBE_BYTES):
            if single:
                raise InvalidInput(
                    f"--data {path}: is neither text nor an array of tokens.\n"
                    f"  try: numpy.save of the tokens ({_ARRAYS[0]}), or raw integers in a file *{_ARRAYS[1]}"
                )
            return None
    return Piece(path=str(path), name=name, dtype="uint8", offset_bytes=0, num_tokens=path.stat().st_size)


def _array(path: Path, name: str, dtype: str) -> Piece:
    if path.suffix == ".bin":
        size, each = path.stat().st_size, np.dtype(dtype).itemsize
        if size % each:
            raise InvalidInput(
                f"--data {path}: {size:,} bytes are no whole number of {dtype}, {each} bytes each.\n"
                f"  try: --token-dtype, one of {', '.join(TOKEN_DTYPES)}"
            )
        return Piece(path=str(path), name=name, dtype=dtype, offset_bytes=0, num_tokens=size // each)
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, and raises whatever that does
        raise InvalidInput(f"--data {path}: is not a plain array of numpy: {error!s:.300}") from error
    if not isinstance(array, np.memmap) or array.dtype.kind not in "iu" or not array.flags.c_contiguous:
        kind = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInput(f"--data {path}: holds {kind}, expected an array of integers, row after row")
    return Piece(path=str(path), name=name, dtype=array.dtype.str, offset_bytes=array.offset, num_tokens=array.size)


@lru_cache(maxsize=256)
def _mapped(piece: Piece) -> NDArray[Any]:
    try:
        return np.memmap(piece.path, piece.dtype, "r", piece.offset_bytes, (piece.num_tokens,))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{piece.path} cannot be read: {error}; it had {piece.num_tokens:,} tokens when training began"
        ) from error
