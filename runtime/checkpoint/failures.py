"""What torch.distributed.checkpoint raises, in one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from autopar.ir.errors import AutoparError, CheckpointError

T = TypeVar("T")

FAILURES = (Exception, CheckpointException)
"""To be caught where torch.distributed.checkpoint is called: what it raises on all ranks is a BaseException."""


def reason(error: BaseException) -> str:
    """What failed first; torch's own text is the traceback of every rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"on rank {rank}: {reason(first)}"
    return str(error) if isinstance(error, (AutoparError, OSError)) else f"{type(error).__name__}: {error!s:.600}"


def reading(where: str, work: Callable[[], T]) -> T:
    """``work()``, which uses what a checkpoint holds. Raises CheckpointError where it holds something else."""
    try:
        return work()
    except AutoparError:
        raise
    except FAILURES as error:
        raise CheckpointError(f"reading {where} failed: {reason(error)}\n  try: an earlier checkpoint") from error
