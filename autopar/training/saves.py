"""The checkpoints that a training loop writes, and what a failed write means to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.ir.errors import CheckpointError
from autopar.runtime.agreement import from_first
from autopar.runtime.checkpoint.folder import newest_step
from autopar.runtime.checkpoint.loading import Progress
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
                raise self._last(error) from error
            self._forgive(error)

    def make_up_for(self, progress: Progress) -> None:
        """Save the state that a job goes on from, its last one, where what made it could not. All ranks call
        together."""
        job = self._job
        if not self._goes_on or job.saves_to is None:
            return
        folder = Path(job.saves_to)
        newest = int(from_first(lambda: str(-1 if (step := newest_step(folder)) is None else step)))
        if newest < progress.step:
            self.after(progress.step, progress.data, last=True)

    def finish(self) -> None:
        """Wait for what is still written."""
        try:
            self._parallel.engine.background.finish()
        except CheckpointError as error:
            raise self._last(error) from error

    def _forgive(self, error: CheckpointError) -> None:
        if not self._goes_on:
            raise error
        self._say(f"{error}\n  training goes on, with copies of its state in memory")

    def _last(self, error: CheckpointError) -> CheckpointError:
        """A failed write after which there is no other."""
        if not self._goes_on:
            return error
        return CheckpointError(f"{error}\n  the state is in memory, and the same command saves it once there is room")
