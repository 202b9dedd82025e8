"""Where ``autopar train`` goes on: nowhere, after the checkpoint that it is told, or after its own newest state."""

from __future__ import annotations

from pathlib import Path

import torch

import autopar
from autopar.runtime.agreement import from_first
from autopar.runtime.checkpoint.folder import has_checkpoint
from autopar.runtime.checkpoint.loading import Progress, load_saved
from autopar.runtime.copies.reading import open_copies
from autopar.runtime.loss_scaler import LossScaler
from autopar.runtime.module import ParallelModule
from autopar.training.job import TrainingJob
from autopar.training.place import Place


def resume(
    job: TrainingJob,
    place: Place | None,
    parallel: ParallelModule,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
) -> Progress:
    """Load the state that the job goes on from; step 0 if it starts. All ranks call together.

    place: of a rank that is supervised, whose supervisor may have found copies in memory.

    Raises CheckpointError, on every rank, also if a job has checkpoints of which none is undamaged: it never starts
    again by itself.
    """
    if place is not None and place.source[0] == "copies":
        _, step, generation = place.source
        saved = open_copies(place.copies, step, generation, parallel.engine.plan)
        return load_saved(parallel, optimizer, saved, scaler=scaler)
    if job.resume is not None:
        return autopar.load(parallel, optimizer, job.resume, scaler=scaler)
    if job.job is None or not _has_checkpoint(job.job):
        return Progress(0, None)
    return autopar.load(parallel, optimizer, job.job, scaler=scaler, fall_back=True)


def keep_start(
    job: TrainingJob,
    parallel: ParallelModule,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
    progress: Progress,
) -> None:
    """Make sure that there is a checkpoint to go back to, as there may be none of this run. All ranks call together.

    progress: where the run begins, and its ``data``.
    """
    assert job.saves_to is not None, "somewhere to go back to"
    if job.job is None or not _has_checkpoint(job.job):
        autopar.save(
            parallel, optimizer, job.saves_to, scaler=scaler, step=progress.step, data=progress.data, keep=job.keep
        )


def go_back(
    job: TrainingJob, parallel: ParallelModule, optimizer: torch.optim.Optimizer, scaler: LossScaler | None
) -> Progress:
    """Load the newest checkpoint of this run. All ranks call together."""
    assert job.saves_to is not None, "somewhere to go back to"
    return autopar.load(parallel, optimizer, job.saves_to, scaler=scaler, fall_back=job.job is not None)


def _has_checkpoint(folder: str) -> bool:
    return from_first(lambda: "yes" if has_checkpoint(Path(folder)) else "") == "yes"
