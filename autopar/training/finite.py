"""Where numbers that are not finite come from, in words."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from autopar.runtime.checkpoint.finite import not_finite
from autopar.runtime.module import ParallelModule


def where_not_finite(parallel: ParallelModule) -> str:
    """Lines that say which parameters, and the losses of which microbatches, are not finite on which ranks.

    All ranks call together. Before the optimiser has read its gradients the parameters are those of the step before.
    """
    microbatches = [number for number, part in enumerate(parallel.engine.losses) if not math.isfinite(float(part))]
    lines = []
    for rank, (names, numbers) in enumerate(_gathered((not_finite(parallel), microbatches))):
        if names:
            lines.append(f"\n  on rank {rank} {len(names)} parameters are not finite, the first is {names[0]}")
        if numbers:
            which = ", ".join(map(str, numbers))
            lines.append(f"\n  on rank {rank}, which has the last stage, the loss of microbatch {which} is not finite")
    return "".join(lines[:8])


def _gathered(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
