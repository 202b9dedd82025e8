"""``autopar train --keep-alive``: this process supervises ranks, all of them or, under torchrun, one."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch

from autopar.ir.errors import InvalidInput
from autopar.runtime.launch import in_job, serves_itself
from autopar.supervision.rendezvous import Rendezvous
from autopar.supervision.store import OwnStore, of_torchrun
from autopar.supervision.supervisor import Supervision, Supervisor
from autopar.training.job import TrainingJob

# What ranks use, so that it is there when they are forked.
_PRELOADED = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.checkpoint")
_LEASE_S = 4.0
_JOIN_S = 300.0


def train_supervised(job: TrainingJob) -> int:
    """Train until the job is done, whatever happens to its ranks; the exit code. Raises AutoparError if it cannot."""
    opened = job.opened()
    size = opened.plan.num_ranks
    index, count = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if in_job() else (0, 1)
    if torch.cuda.is_initialized():
        raise InvalidInput("--keep-alive forks its ranks, which the model file prevents: it has used CUDA.")
    slots = size if count == 1 else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // slots)))
    if torch.cuda.device_count() < max(slots, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more ranks than GPUs: all of them on CPUs
    for name in _PRELOADED:
        import_module(name)
    store = None
    if count == 1:
        store = OwnStore()
    elif index == 0 and not serves_itself():
        store = OwnStore(of_torchrun().port)
    try:
        address = store.address if store is not None and count == 1 else of_torchrun()
        timeout = job.environment.timeout_s
        rendezvous = Rendezvous(
            address, index, count, lease_s=_LEASE_S, join_s=timeout or _JOIN_S, come_back=serves_itself()
        )
        given = Supervision(
            slots=slots, failures=job.failures, say=lambda line: print(line, file=sys.stderr, flush=True)
        )
        return Supervisor(opened, address, rendezvous, given).run()
    finally:
        if store is not None:
            store.stop()
