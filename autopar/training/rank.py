"""One rank of a job as a process of its own: its exit code, and who says what went wrong."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import nullcontext
from functools import partial

import torch.distributed as dist

from autopar.ir.errors import AutoparError, CopiesDiffer, LaunchError
from autopar.runtime.accord import is_lost, leave_note
from autopar.standard_output import reserved_output
from autopar.training.job import OpenedJob, TrainingJob
from autopar.training.loop import Result, train
from autopar.training.place import Place
from autopar.training.warm import Warm

DIFFERS, BAD_INPUT = 1, 2
LOST_OTHERS = 75
"""Exit code of a supervised rank whose error is of another rank's end."""

_LAST_WORDS_S = 2.0


class LostOthers(Exception):
    """Another rank has ended, or does not come."""


def run_rank(job: TrainingJob) -> int:
    """The exit code: 0, 1 if the losses differ from those of one process, 2 for a mistake of the user's, 128 and the
    number of a signal after which the state was saved."""
    try:
        with reserved_output() if job.json else nullcontext(sys.stdout) as out:
            return _exit_code(train(job, say=partial(print, file=out, flush=True)))
    except AutoparError as error:
        _explain(error)
        return BAD_INPUT
    except Exception as error:
        leave_note(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_place(opened: OpenedJob, place: Place, warm: Warm) -> int:
    """The exit code of a rank that a supervisor watches. What goes wrong in it is raised, but for mistakes of the
    user's, which rank 0 says. Raises LostOthers for what goes wrong because another rank has ended."""
    job = opened.job
    # What it logs, the whole schedule, is raised too; the first that a user reads is the supervisor's cause.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    try:
        with reserved_output() if job.json else nullcontext(sys.stdout) as out:
            return _exit_code(
                train(job, say=partial(print, file=out, flush=True), opened=opened, place=place, warm=warm)
            )
    except LaunchError as error:
        raise LostOthers(str(error)) from error
    except AutoparError as error:
        if isinstance(error, CopiesDiffer) and job.job is not None:
            raise  # the job goes on from its checkpoint, which is of a state that was compared
        if place.rank == 0:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except RuntimeError as error:
        if is_lost(error, late=True):
            raise LostOthers(str(error)) from error
        raise


def _exit_code(result: Result) -> int:
    return result.left or (0 if result.agrees else DIFFERS)


def _explain(error: AutoparError) -> None:
    """Once on each machine: launchers end all ranks once one has left, and all of them know of the error.

    The first rank of a machine speaks and leaves; the others wait for it.
    """
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_LAST_WORDS_S)
