"""Checkpoints of what trains alone: which tensors those are, and how it is known that the rest is what it was."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from autopar.ir.parameters import local_of
from autopar.runtime.module import ParallelModule

# Integers as wide as an element: sums of them are the same in any order.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        part = local_of(parameter.detach()).contiguous()
        words = part.view(_WORDS[part.element_size()]) if part.element_size() in _WORDS else part.view(torch.uint8)
        # Weights that change places change the sum.
        total += words.sum(dtype=torch.int64).cpu() * (zlib.crc32(name.encode()) | 1)
    total = total.to(engine.device)
    dist.all_reduce(total)
    return int(total)
