"""Measures the machine of a job, all ranks together, and describes it as a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_model.catalogue import find_gpu, make_cluster
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.errors import InvalidCluster
from autopar.local_cluster import catalogue_name
from autopar.profiling.clock import Clock
from autopar.profiling.compare import Series, compare
from autopar.profiling.compute import measure_compute
from autopar.profiling.disk import host_memory_gb, measure_disk
from autopar.profiling.fit import description_of
from autopar.profiling.links import measure_links
from autopar.profiling.samples import Samples
from autopar.runtime.freed_memory import keep_freed_memory
from autopar.runtime.launch import this_device

# Everything is measured so many times, one pass after the other.
_PASSES = 3


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements, and the cluster file fitted to them."""

    samples: Samples
    description: dict[str, Any]

    @property
    def cluster(self) -> Cluster:
        """The cluster that the profile describes."""
        return cluster_from_dict(self.description)

    def series(self) -> list[Series]:
        """Measurements beside predictions with the fitted figures."""
        return compare(self.samples, self.cluster)


def profile(
    progress: Callable[[str], object], *, like: str | None = None, seconds: float = 0.2, disk: Path | None = None
) -> Profile:
    """Measure with all ranks of the default group, each of which calls this and gets the same.

    like: the catalogue's entry to start from, for a GPU that it does not have. seconds: spent on each measurement,
    over all passes. disk: folder on a local disk that is measured too.
    Raises DiskError where that is none, InvalidCluster where the GPU is unknown or the nodes have different numbers of
    ranks.
    """
    keep_freed_memory()
    device = this_device()
    gpu = find_gpu(like).name.lower() if like else catalogue_name(device)
    cluster = make_cluster(gpu, dist.get_world_size(), _ranks_per_node(device))
    clock, passes = Clock(device, seconds=seconds / _PASSES), []
    for number in range(_PASSES):
        samples, report = Samples(), partial(_report, progress, number + 1)
        measure_compute(samples, clock, cluster.device.precisions, report)
        if cluster.num_gpus > 1:
            measure_links(samples, clock, cluster, report)
        passes.append(samples)
    samples = Samples.typical(passes)
    description = description_of(samples, cluster, gpu)
    if disk is not None:
        own = cluster.gpus_per_node
        description |= {"host_memory_gb": host_memory_gb(own), "disk": measure_disk(disk, own, progress)}
    return Profile(samples, description)


def _report(progress: Callable[[str], object], number: int, doing: str) -> None:
    progress(f"{number} of {_PASSES}: {doing}")


def _ranks_per_node(device: torch.device) -> int:
    count = dist.get_world_size()
    own = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", count))], device=device)
    all_of_them = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(all_of_them, own)
    found = sorted({int(number) for number in all_of_them})
    if len(found) > 1:
        raise InvalidCluster(
            f"the nodes of this job have {' and '.join(map(str, found))} ranks; a cluster has equally many on each.\n"
            "  try: the same --nproc-per-node everywhere"
        )
    return found[0]
