"""Whether a checkpoint has room on disk, before anything of it is written."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.ir.errors import CheckpointError
from autopar.runtime.agreement import agree
from autopar.runtime.module import ParallelModule

# What a tensor takes beside its elements: 1.2 to 1.6 KiB of torch.save's own, and its place in the metadata.
_BESIDE_BYTES = 2048


def check_free_space(
    pm: ParallelModule, path: Path, shared: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], state: bytes
) -> None:
    """Raise CheckpointError, on every rank, unless the file system of ``path`` has room. All ranks call together.

    shared: tensors of this rank's stages, each of which is written once for all ranks that have it. own: of this rank
    alone. state: whatever else rank 0 writes. A checkpoint is one folder on a file system that all ranks share, so what
    they write is counted together, and what each of them sees to be free has to be enough for all.
    """
    parts: list[dict[str, int]] = [{} for _ in range(pm.engine.mesh.num_pipeline_ranks)]
    sizes = {name: stored_bytes(tensor) for name, tensor in shared.items()}
    # Ranks at one place of each stage have all tensors between them.
    dist.all_gather_object(parts, sizes, group=pm.engine.mesh.pipeline_group())
    everything: dict[str, int] = {}
    for part in parts:
        everything |= part
    of_ranks = dist.get_world_size() * sum(map(stored_bytes, own.values()))
    needed = sum(everything.values()) + of_ranks + len(state)
    agree(lambda: check_room(path, needed))


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor in a checkpoint, of all its parts: at least what torch writes."""
    chunks = 1
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        chunks = math.prod(size for placement, size in sizes if placement.is_shard())
    return math.prod(tensor.shape) * tensor.element_size() + chunks * _BESIDE_BYTES


def check_room(path: Path, needed: int) -> None:
    """Raise CheckpointError unless as many bytes are free where ``path`` is or will be."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint to {path}: {error.strerror}") from error
    if needed > free:
        raise CheckpointError(
            f"a checkpoint of {_words(needed)} has no room in {os.fspath(path)}: {_words(free)} are free. Nothing is "
            "written, and what was saved before is kept.\n"
            "  try: another file system; fewer kept checkpoints (keep=1); trainable_only=True for a model with adapters"
        )


def _words(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
