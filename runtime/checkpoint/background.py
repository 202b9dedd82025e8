"""The write of a checkpoint beside training: a process group of its own, and a handle to wait for it."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.failures import reason


class Saving:
    """A checkpoint that is being written, or is written. ``wait()`` returns when the write is complete."""

    def __init__(self, path: str, future: Future[Any] | None) -> None:
        """future: of the write; None if it is complete."""
        self._path, self._future = path, future
        self._told = False

    @property
    def done(self) -> bool:
        """Whether the write has ended."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Wait for the write. Raises CheckpointError, on every rank, if it failed on any."""
        error = None if self._future is None else self._future.exception()
        if error is not None:
            self._told = True
            raise write_failed(self._path, error) from error

    def failure(self) -> CheckpointError | None:
        """Why the write failed, if it has and ``wait()`` has not said so. Does not wait."""
        error = None if self._told or self._future is None or not self._future.done() else self._future.exception()
        return None if error is None else write_failed(self._path, error)

    def finish(self) -> None:
        """``wait()``, but an error that it has raised before is not raised again."""
        if not self._told:
            self.wait()


def write_failed(path: str, error: BaseException) -> CheckpointError:
    """The error of a write that failed."""
    return CheckpointError(f"writing a checkpoint to {path} failed: {reason(error)}\n  what was saved before is kept")


@dataclass(slots=True)
class Background:
    """State of writes beyond one call: their process group, and the write that may be running.

    damaged: names of checkpoints that were found damaged, which do not count among those that are kept.
    """

    saving: Saving | None = None
    damaged: set[str] = field(default_factory=set)
    _group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup:
        """All ranks over gloo, apart from the groups of training. Made by all ranks together at the first call."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def failure(self) -> CheckpointError | None:
        """Why the write that was going on has failed, if it has and nobody was told. Does not wait."""
        return None if self.saving is None else self.saving.failure()

    def finish(self) -> None:
        """Wait for the write that is going on, if any. Raises CheckpointError if it failed and nobody was told."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish()

    def drop(self) -> None:
        """Let go of a write that has failed, which is told already. It fails on all ranks, if not at one instant."""
        with suppress(CheckpointError):
            self.finish()
