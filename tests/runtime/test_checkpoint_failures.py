"""What torch.distributed.checkpoint raises, which is no ``Exception``, is one message of autopar."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.background import Saving
from autopar.runtime.checkpoint.failures import reading
from autopar.runtime.checkpoint.folder import latest

FULL = CheckpointException("write", {1: (OSError(28, "No space left on device"), StackSummary())})


def test_a_read_says_what_failed_and_on_which_rank() -> None:
    def read() -> None:
        raise FULL

    with pytest.raises(CheckpointError, match=r"reading run failed: on rank 1: .*No space left on device\n  try: an"):
        reading("run", read)


def test_a_write_beside_training_says_so_when_it_is_waited_for() -> None:
    future: Future[Any] = Future()
    future.set_exception(FULL)
    with pytest.raises(CheckpointError, match=r"writing a checkpoint to run failed: on rank 1: .*No space left"):
        Saving("run", future).wait()


def test_a_binary_name_of_the_latest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xa0\xff")
    with pytest.raises(CheckpointError, match="is damaged: it holds"):
        latest(tmp_path)
