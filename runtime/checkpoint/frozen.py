"""Checkpoints of what trains alone: which tensors those are, and how it is known that the rest is what it was."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from autopar.ir.primitives.read_parameter import local_of
from autopar.runtime.check_sum import check_sum
from autopar.runtime.module import ParallelModule


def changes(pm: ParallelModule) -> set[str]:
    """Names of the parameters that train, and of the buffers that forward writes."""
    captured = pm.engine.captured
    trained = {p.name for p in captured.parameters.values() if p.requires_grad}
    return trained | {b.name for b in captured.buffers.values() if b.updated_by is not None}


def frozen_sum(pm: ParallelModule) -> int:
    """A check sum of the frozen parameters, the same under every plan. All ranks call together."""
    engine = pm.engine
    trained, total = changes(pm), torch.zeros((), dtype=torch.int64)
    for name, parameter in pm.named_parameters():
        if name in trained or not engine.stored[name].counted_here(engine.mesh):
            continue
        # Weights that change places change the sum.
        total += torch.tensor(check_sum(local_of(parameter))) * (zlib.crc32(name.encode()) | 1)
    total = total.to(engine.device)
    dist.all_reduce(total)
    return int(total)
