"""``autopar train --keep-alive``: this process supervises ranks, all of them or, under torchrun, those of its host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import torch

from autopar.ir.errors import InvalidInput
from autopar.launching.torchrun_rounds import announce
from autopar.runtime.launch import in_job, serves_itself
from autopar.supervision.local_workers import awaited, hosts_are_numbered, is_to_wait, wait_for_supervisor
from autopar.supervision.rendezvous import Rendezvous
from autopar.supervision.store import OwnStore, of_torchrun
from autopar.supervision.supervisor import Supervision, Supervisor
from autopar.training.job import TrainingJob

# What ranks use, so that it is there when they are forked.
_PRELOADED = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.checkpoint")
_LEASE_S = 4.0
_JOIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorPlace:
    """Of one supervisor among those of a job. slots: ranks that it can run; None for all of the plan. workers: that the
    launcher has started beside it on its host."""

    index: int = 0
    count: int = 1
    slots: int | None = None
    workers: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SupervisorPlace:
        """From what the launcher has set: one a host under torchrun, one a rank where hosts are not numbered."""
        if not in_job():
            return cls()
        if not hosts_are_numbered(environment):
            return cls(index=int(environment["RANK"]), count=int(environment["WORLD_SIZE"]), slots=1)
        size = int(environment["LOCAL_WORLD_SIZE"])
        index, count = int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
        return cls(index=index, count=count, slots=size, workers=size - 1)


def train_supervised(job: TrainingJob) -> int:
    """Train until the job is done, whatever happens to its ranks; the exit code. Raises AutoparError if it cannot."""
    if is_to_wait(os.environ):
        wait_for_supervisor()
    place = SupervisorPlace.of(os.environ)
    with awaited(place.workers) as tell_workers:
        code = _supervise(job, place)
        if code == 0:
            tell_workers()
    return code


def _supervise(job: TrainingJob, place: SupervisorPlace) -> int:
    # A fork does not copy the threads of a pool, and a rank that computed with the pool would wait for them for ever.
    # So this process computes in one thread, and each rank makes a pool of its own.
    given_threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None
    torch.set_num_threads(1)
    announce(os.environ)
    opened = job.opened()
    if torch.cuda.is_initialized():
        raise InvalidInput("--keep-alive forks its ranks, which the model file prevents: it has used CUDA.")
    slots = opened.plan.num_ranks if place.slots is None else place.slots
    threads = given_threads or max(1, (os.cpu_count() or 1) // slots)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if torch.cuda.device_count() < max(slots, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more ranks than GPUs: all of them on CPUs
    for name in _PRELOADED:
        import_module(name)
    store = None
    if place.count == 1:
        store = OwnStore()
    elif place.index == 0 and not serves_itself():
        store = OwnStore(of_torchrun().port)
    try:
        address = store.address if store is not None and place.count == 1 else of_torchrun()
        rendezvous = Rendezvous(
            address,
            place.index,
            place.count,
            lease_s=_LEASE_S,
            join_s=job.environment.timeout_s or _JOIN_S,
            come_back=serves_itself(),
        )
        given = Supervision(
            slots=slots,
            threads=threads,
            failures=job.failures,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        return Supervisor(opened, address, rendezvous, given).run()
    finally:
        if store is not None:
            store.stop()
