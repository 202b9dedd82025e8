"""The checkpoints that a training loop writes, and what a failed write means to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import autopar
from autopar.ir.errors import CheckpointError
from autopar.runtime.loss_scaler import LossScaler
from autopar.runtime.module import ParallelModule
from autopar.training.job import TrainingJob


class Saves:
    """Of one job. A failed write ends it, on all ranks; a job whose state is copied to memory goes on without."""

    def __init__(
        self,
        job: TrainingJob,
        parallel: ParallelModule,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler | None,
        *,
        goes_on: bool,
        say: Callable[[str], object],
    ) -> None:
        """goes_on: after a failed write, but for the last one. say: takes a line for the user."""
        self._job, self._parallel, self._optimizer, self._scaler = job, parallel, optimizer, scaler
        self._goes_on, self._say = goes_on, say

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """A step of the module, which raises what has become of a write beside it. All ranks call together."""
        try:
            return self._parallel.step(*args, **kwargs)
        except CheckpointError as error:
            self._forgive(error)
        return self._parallel.step(*args, **kwargs)

    def after(self, number: int, state: dict[str, Any], *, last: bool) -> None:
        """Save after step ``number``, if it is time to. state: where the data stands. All ranks call together."""
        job = self._job
        if job.saves_to is None or not (last or job.saves_after(number)):
            return
        try:
            autopar.save(
                self._parallel, self._optimizer, job.saves_to, scaler=self._scaler, step=number, data=state,
                asynchronous=True, keep=job.keep,
            )  # fmt: skip
        except CheckpointError as error:
            if last:
                raise
            self._forgive(error)

    def _forgive(self, error: CheckpointError) -> None:
        if not self._goes_on:
            raise error
        self._say(f"{error}\n  training goes on, with copies of its state in memory")
