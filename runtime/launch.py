"""Joining the process group of a job started by torchrun (or anything that sets the same environment)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autopar.ir.errors import PlanMismatch


def ensure_process_group() -> None:
    """Join the default process group if that has not happened: nccl on CUDA, gloo on CPUs.

    Rank and world size come from torchrun's environment; without it the job has one rank. Raises PlanMismatch
    if a node has more ranks than GPUs.
    """
    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise PlanMismatch(
                f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}.\n"
                "  try: torchrun --nproc-per-node with at most the number of GPUs"
            )
        torch.cuda.set_device(local_rank)
        backend, device_id = "nccl", torch.device("cuda", local_rank)
    else:
        backend, device_id = "gloo", None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device_id)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device_id)


def this_device() -> torch.device:
    """The device that this rank computes on: its CUDA device if the job runs on nccl, else the CPU."""
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
