"""The cluster that a job runs on, as far as the processes can tell."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace

import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import Disk
from autopar.ir.errors import InvalidCluster

# Bytes/s of one rank, a guess: ``autopar profile --disk`` measures it.
_DISK_BANDWIDTH = 5e8

# Words of a device's name, most special first, and its name in the catalogue.
_NAMES = (
    (("GB300",), "gb300"),
    (("GB200",), "gb200"),
    (("B300",), "b300"),
    (("B200",), "b200"),
    (("H200",), "h200"),
    (("H100", "PCIe"), "h100-pcie"),
    (("H100",), "h100-sxm"),
    (("A100", "PCIE", "80GB"), "a100-80gb-pcie"),
    (("A100", "80GB"), "a100-80gb"),
    (("A100",), "a100-40gb"),
    (("V100",), "v100"),
    (("MI355X",), "mi355x"),
    (("MI325X",), "mi325x"),
    (("MI300X",), "mi300x"),
)


def local_cluster(num_ranks: int, device: torch.device) -> Cluster:
    """``num_ranks`` devices like this one, on nodes of as many as torchrun started here.

    Raises InvalidCluster for a GPU that the catalogue does not have.
    """
    per_node = min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    return make_cluster(catalogue_name(device), num_ranks, per_node)


def with_disk(cluster: Cluster, folder: str | os.PathLike[str] | None) -> Cluster:
    """The cluster with the disk of ``folder`` where it says nothing of one: what is free there, at a guessed speed."""
    if folder is None or cluster.device.disk is not None or not os.path.isdir(folder):
        return cluster
    free = shutil.disk_usage(folder).free / cluster.gpus_per_node
    disk = Disk(read_bandwidth=_DISK_BANDWIDTH, write_bandwidth=_DISK_BANDWIDTH, capacity=free)
    return replace(cluster, device=replace(cluster.device, disk=disk))


def catalogue_name(device: torch.device) -> str:
    """The catalogue's entry for a device. Raises InvalidCluster for a GPU that it does not have."""
    if device.type == "cpu":
        return "cpu"
    found = torch.cuda.get_device_name(device)
    words = re.split(r"[\W_]+", found.lower())
    for parts, name in _NAMES:
        if all(part.lower() in words for part in parts):
            return name
    raise InvalidCluster(
        f"this GPU, {found!r}, is not in the catalogue, so nothing is known of its speed.\n"
        "  try: autopar profile --like and the most similar GPU, and parallelize(model, autopar.cluster_from_yaml(...))"
    )
