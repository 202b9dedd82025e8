"""``autopar train --ray``: the same loop on a Ray cluster; what rank 0 reports is printed here, line by line."""

from __future__ import annotations

from typing import Any

from autopar.launching.on_ray import connected, run_ranks
from autopar.training.job import TrainingJob
from autopar.training.rank import DIFFERS


class _Lines:
    """An actor that keeps lines until they are taken."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def put(self, line: str) -> None:
        self._lines.append(line)

    def take(self) -> list[str]:
        taken, self._lines = self._lines, []
        return taken


def train_on_ray(job: TrainingJob, address: str, *, cpus_per_rank: int = 1) -> int:
    """Train on the cluster at ``address``; the exit code. Every machine reads model, plan and data at the same paths.

    Raises AutoparError, once, for what a rank raised and for a cluster that has no room.
    """
    job = job.with_absolute_paths()
    plan = job.opened().plan
    with connected(address, plan.num_ranks * cpus_per_rank) as ray:
        lines = ray.remote(_Lines).options(num_cpus=0).remote()

        def show() -> None:
            for line in ray.get(lines.take.remote()):
                print(line, flush=True)

        agree = run_ranks(
            ray,
            _train_rank,
            plan,
            (job, lines),
            environment=job.environment,
            cpus_per_rank=cpus_per_rank,
            meanwhile=show,
        )
    return 0 if all(agree) else DIFFERS


def _train_rank(job: TrainingJob, lines: Any) -> bool:
    import ray

    from autopar.training.loop import train

    # Waits for the line to be kept, so that none is missing when the rank is done.
    return train(job, lambda line: ray.get(lines.put.remote(line))).agrees
