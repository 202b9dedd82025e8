"""Where the ranks of ``autopar train`` come from."""

from __future__ import annotations

import os

from autopar.ir.errors import InvalidInput
from autopar.process_end import end_with
from autopar.runtime.launch import in_job
from autopar.training.job import TrainingJob


def launch(job: TrainingJob, *, ray: str | None = None, cpus_per_rank: int = 1) -> int:
    """Train, and return the exit code: 0, 1 if a rank failed or the losses differ, 2 for a mistake of the user's.

    Under torchrun, or whatever sets RANK and WORLD_SIZE as it does, this process is one rank of that job. Else ranks
    are started: on the Ray cluster at ``ray``, or on this machine. Raises AutoparError if they cannot be.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    if ray is not None:
        if in_job():
            raise InvalidInput(
                "--ray starts the ranks itself, but RANK and WORLD_SIZE say that this process is one already.\n"
                "  try: without torchrun, or without --ray"
            )
        if job.keep_alive:
            from autopar.launching.ray_supervised import supervise_on_ray

            return supervise_on_ray(job, ray, cpus_per_rank=cpus_per_rank)
        from autopar.launching.ray_training import train_on_ray

        return train_on_ray(job, ray, cpus_per_rank=cpus_per_rank)
    if job.keep_alive:
        from autopar.launching.supervised import train_supervised

        return train_supervised(job)
    if in_job():
        from autopar.training.rank import run_rank

        return run_rank(job)
    from autopar.launching.here import train_here

    return train_here(job)
