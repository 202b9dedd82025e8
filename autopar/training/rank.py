"""One rank of a job as a process of its own: its exit code, and who says what went wrong."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from functools import partial

import torch.distributed as dist

from autopar.ir.errors import AutoparError
from autopar.runtime.accord import leave_note
from autopar.standard_output import reserved_output
from autopar.training.job import TrainingJob
from autopar.training.loop import train

BAD_INPUT = 2
_LAST_WORDS_S = 2.0


def run_rank(job: TrainingJob) -> int:
    """The exit code: 0, 1 if the losses differ from those of one process, 2 for a mistake of the user's."""
    try:
        with reserved_output() if job.json else nullcontext(sys.stdout) as out:
            return 0 if train(job, say=partial(print, file=out, flush=True)) else 1
    except AutoparError as error:
        _explain(error)
        return BAD_INPUT
    except Exception as error:
        leave_note(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _explain(error: AutoparError) -> None:
    """Once on each machine: launchers end all ranks once one has left, and all of them know of the error.

    The first rank of a machine speaks and leaves; the others wait for it.
    """
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_LAST_WORDS_S)
