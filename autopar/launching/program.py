"""A training job as a program of its own, which schedulers start."""

from __future__ import annotations

import sys
from typing import NoReturn

from autopar.ir.errors import AutoparError
from autopar.launching.launch import launch
from autopar.process_end import end_process
from autopar.training.job import TrainingJob
from autopar.training.rank import BAD_INPUT


def run_program(text: str, *, ray: str | None = None) -> NoReturn:
    """``launch`` a job that is given as JSON, and end this process with its exit code: 2, with one message, for what a
    user can mend. ray: address of the cluster to train on."""
    try:
        code = launch(TrainingJob.from_json(text), ray=ray)
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = BAD_INPUT
    end_process(code)
