"""Reads ahead and writes behind: one thread for each, so that a disk does both at once."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from autopar.ir.errors import DiskError
from autopar.runtime.disk.file import TensorFile

# Files that are being written at a time. Another one waits, or what is to be written would fill the memory.
_MOST_WRITES = 2


@dataclass(slots=True)
class Traffic:
    """read, written: bytes, by one rank. waited_s: seconds in which the rank did nothing but wait for the disk."""

    read: int = 0
    written: int = 0
    waited_s: float = 0.0


class Mover:
    """Moves the files of one rank. Each file is in memory, on its way, or on the disk alone.

    Raises DiskError, at the latest when a file that has failed is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.traffic = Traffic()
        self._reader = ThreadPoolExecutor(1, "autopar-disk-read")
        self._writer = ThreadPoolExecutor(1, "autopar-disk-write")
        self._moves: dict[TensorFile, Future[None]] = {}
        self._here: set[TensorFile] = set()
        self._writes: deque[Future[None]] = deque()

    def is_here(self, file: TensorFile) -> bool:
        """Whether a file is in memory, or comes."""
        return file in self._here

    def made(self, file: TensorFile) -> None:
        """A new file is in memory."""
        self._here.add(file)

    def take(self, file: TensorFile) -> None:
        """Have a file in memory without what it has: all of its tensors that are used get other values."""
        if file not in self._here:
            self._wait(self._moves.pop(file, None))
            file.take()
            self._here.add(file)

    def fetch(self, file: TensorFile) -> None:
        """Begin to read a file, if it is on the disk alone."""
        if file not in self._here:
            self._here.add(file)
            self._start(self._reader, file, lambda: self._read(file))

    def need(self, file: TensorFile) -> None:
        """Wait until a file is in memory."""
        self.fetch(file)
        self._wait(self._moves.pop(file, None))

    def release(self, file: TensorFile, *, changed: bool) -> None:
        """A file is not needed for now. changed: whether it is other than on the disk, as far as is known."""
        if file not in self._here:
            return
        self._here.discard(file)
        if not changed:
            self._start(self._reader, file, lambda: self._drop(file))
            return
        while len(self._writes) >= _MOST_WRITES:
            self._wait(self._writes.popleft())
        self._writes.append(self._start(self._writer, file, lambda: self._write(file)))

    def settle(self) -> None:
        """Wait for everything that is on its way. Only then may tensors be changed whose files are not needed."""
        self._writes.clear()
        while self._moves:
            _, move = self._moves.popitem()
            self._wait(move)

    def _start(self, pool: ThreadPoolExecutor, file: TensorFile, work: Callable[[], None]) -> Future[None]:
        # A move that was begun before this one never waits for it.
        before = self._moves.get(file)

        def move() -> None:
            if before is not None:
                before.result()
            work()

        found = self._moves[file] = pool.submit(move)
        return found

    def _read(self, file: TensorFile) -> None:
        self.traffic.read += file.read()

    def _write(self, file: TensorFile) -> None:
        self.traffic.written += file.write()

    def _drop(self, file: TensorFile) -> None:
        self.traffic.written += file.drop()

    def _wait(self, move: Future[None] | None) -> None:
        if move is None:
            return
        start = time.perf_counter()
        try:
            move.result()
        except OSError as error:
            raise DiskError(
                f"the disk of {os.fspath(self.folder)}, where the plan keeps parameters and optimiser state, failed: "
                f"{error.strerror or error}\n  The step is lost, and what was saved before is kept.\n"
                "  try: another folder on another disk, and go on from the last checkpoint"
            ) from error
        finally:
            self.traffic.waited_s += time.perf_counter() - start
