"""Joining the process group of a job started by torchrun (or anything that sets the same environment)."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from autopar.ir.errors import LaunchError, PlanMismatch
from autopar.runtime.environment import Environment
from autopar.runtime.gathering import gather
from autopar.runtime.settling import settle_at_exit
from autopar.runtime.stores import HashStore, PrefixStore, Store, TCPStore
from autopar.runtime.torch_private import wait_at_most

_PATIENCE = timedelta(minutes=30)
_JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def in_job() -> bool:
    """Whether this process is a rank of a job that torchrun or the like has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ensure_process_group(environment: Environment | None = None, store: Store | None = None) -> None:
    """Join the default process group if that has not happened: nccl on CUDA, gloo on CPUs.

    store: where ranks meet, if not where torchrun's environment says.

    Restarted by torchrun, ranks meet in the store of its agent, which has the keys of those before: they agree on a
    name of their own there (``runtime.gathering``).

    Rank and world size come from torchrun's environment; without it the job has one rank. Raises PlanMismatch
    if a node has more ranks than GPUs, on all of its ranks, and LaunchError if the ranks do not find each other.
    """
    settle_at_exit()
    if dist.is_initialized():
        return
    environment = Environment() if environment is None else environment
    environment.apply()
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if ranks > torch.cuda.device_count():
            raise PlanMismatch(
                f"this node has {ranks} ranks and {torch.cuda.device_count()} GPUs.\n"
                "  try: torchrun --nproc-per-node with at most the number of GPUs, or CUDA_VISIBLE_DEVICES= for CPUs"
            )
        torch.cuda.set_device(local_rank)
        backend, device_id = "nccl", torch.device("cuda", local_rank)
    else:
        backend, device_id = "gloo", None
    timeout = environment.timeout
    if timeout is not None:
        wait_at_most(timeout)
    join = partial(dist.init_process_group, backend, device_id=device_id, timeout=timeout)
    if store is not None:
        join(store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        return
    if "RANK" not in os.environ:
        store = HashStore()
        join(store=store, rank=0, world_size=1)
        return
    if missing := [name for name in _JOB if not os.environ.get(name)]:
        raise LaunchError(
            f"RANK is set, but not {', '.join(missing)}.\n"
            f"  expected: all of {', '.join(_JOB)}, as torchrun sets them, or none of them"
        )
    try:
        if serves_itself():
            number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _own_part_of_store(number, count, _PATIENCE if timeout is None else timeout)
            join(store=store, rank=number, world_size=count)
        else:
            join()
    except (RuntimeError, ValueError) as error:
        rank, size, address, port = (os.environ[name] for name in _JOB)
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"rank {rank} of {size} could not join the job at {address}:{port}: {reason}\n"
            f"  expected: {size} ranks that reach this address and each other\n"
            "  try: the same job on every machine, --network-interface NAME, --timeout SECONDS, --debug"
        ) from error


def serves_itself() -> bool:
    """Whether torchrun's agent has the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_part_of_store(rank: int, size: int, timeout: timedelta) -> Store:
    """Of the store of torchrun's agent, what is this start's alone."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    return PrefixStore(f"autopar/{gather(store, rank, size, timeout.total_seconds())}", store)


def this_device() -> torch.device:
    """The device that this rank computes on: its CUDA device if the job runs on nccl, else the CPU."""
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
