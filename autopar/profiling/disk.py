"""What a local disk achieves while all ranks of a node read or write at once, as where a plan keeps state on it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_model.hardware.device import GB
from autopar.ir.errors import DiskError
from autopar.runtime.agreement import agree
from autopar.runtime.disk.file import TensorFile, TensorLayout
from autopar.runtime.disk.state import disk_folder

# Of the file of a rank.
_BYTES = 256 << 20
_ROUNDS = 3


def measure_disk(folder: Path, ranks_per_node: int, report: Callable[[str], object]) -> dict[str, float]:
    """GB/s of one rank, and GB that are free for it, as ``disk`` of a cluster file has them. All ranks call together.

    Files are read and written as those of a plan are, with their checksums. Raises DiskError, on every rank.
    """
    layout = TensorLayout("measured", (_BYTES,), torch.uint8)
    report("disk")
    path = agree(lambda: disk_folder(folder))
    free = agree(lambda: shutil.disk_usage(path).free)
    file = agree(lambda: _file(path, layout))
    data = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8)
    best = {"read": 0.0, "write": 0.0}
    for _ in range(_ROUNDS):
        file.take()
        file.tensors["measured"].copy_(data)
        for name, move in (("write", file.write), ("read", file.read)):
            best[name] = max(best[name], _rate(move))
    slowest = torch.tensor([best["read"], best["write"], float(free)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=_between_cpus())
    read, write, room = slowest.tolist()
    found = {"read_gb_s": read / GB, "write_gb_s": write / GB, "capacity_gb": room / ranks_per_node / GB}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def host_memory_gb(ranks_per_node: int) -> float:
    """One rank's share of the memory of this node."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(f"{size / ranks_per_node / GB:.4g}")


def _between_cpus() -> Any:
    return dist.new_group(backend="gloo")


def _file(path: Path, layout: TensorLayout) -> TensorFile:
    try:
        return TensorFile(path, [layout])
    except OSError as error:
        raise DiskError(
            f"{path}: no room for a file of {_BYTES >> 20} MiB: {error.strerror or error}\n  try: another folder"
        ) from error


def _rate(move: Callable[[], int]) -> float:
    """Bytes/s of this rank, with all ranks at it."""
    dist.barrier()
    start = time.perf_counter()
    size = move()
    return size / (time.perf_counter() - start)
