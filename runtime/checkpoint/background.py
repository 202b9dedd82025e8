"""The write of a checkpoint beside training: a process group of its own, and a handle to wait for it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autopar.ir.errors import CheckpointError


class Saving:
    """A checkpoint that is being written, or is written. ``wait()`` returns when the write is complete."""

    def __init__(self, path: str, future: Future[Any] | None) -> None:
        """future: of the write; None if it is complete."""
        self._path, self._future = path, future

    @property
    def done(self) -> bool:
        """Whether the write has ended."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Wait for the write. Raises CheckpointError, on every rank, if it failed on any."""
        future, self._future = self._future, None
        if future is None:
            return
        try:
            future.result()
        except Exception as error:
            raise write_failed(self._path, error) from error


def write_failed(path: str, error: BaseException) -> CheckpointError:
    """The error of a write that failed."""
    return CheckpointError(f"writing a checkpoint to {path} failed: {error}\n  the one before it is still complete")


@dataclass(slots=True)
class Background:
    """State of writes beyond one call: their process group, and the write that may be running."""

    saving: Saving | None = None
    _group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup:
        """All ranks over gloo, apart from the groups of training. Made by all ranks together at the first call."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def finish(self) -> None:
        """Wait for the write that is going on, if there is one."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()
