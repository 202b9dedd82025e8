"""All ranks on this machine, each a process, started by torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from contextlib import nullcontext

import torch

from autopar.standard_output import reserved_output
from autopar.training.job import TrainingJob
from autopar.training.rank import BAD_INPUT


def train_here(job: TrainingJob) -> int:
    """Trains on as many processes of this machine as the plan has ranks; returns the exit code.

    Rank 0 prints. If a rank fails the others are ended. Raises AutoparError if the job cannot start.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with reserved_output() if job.json else nullcontext():
        plan = job.opened().plan
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // plan.num_ranks)))
    if torch.cuda.device_count() < plan.num_ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more ranks than GPUs: all of them on CPUs
    # The launcher reports a failed rank in a page of its own; the rank has already said what is wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "autopar.training", job.to_json())
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return BAD_INPUT if BAD_INPUT in codes else 1
    return 0
