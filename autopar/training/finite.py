"""A loss that is not finite is said, with where it came from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.errors import NotFinite
from autopar.runtime.checkpoint.finite import not_finite
from autopar.runtime.module import ParallelModule

_TRY = "try: a smaller --lr, or a look at the data of this step"


def check_finite(parallel: ParallelModule, loss: torch.Tensor, step: int, saved_in: str | None) -> None:
    """Raise NotFinite, on every rank, if the loss of a step is not finite. All ranks call together.

    Before the optimiser has read its gradients, so that the parameters are still those of the step before.
    """
    value = float(loss)
    if not _is_number(value):
        kept = "" if saved_in is None else f"\n  the checkpoint in {saved_in}, if there is one, is kept as it was"
        raise NotFinite(f"step {step}: the loss is {value}.{_where(parallel)}{kept}\n  {_TRY}")


def _where(parallel: ParallelModule) -> str:
    """Which parameters, and the losses of which microbatches, are not finite on which ranks."""
    microbatches = [number for number, part in enumerate(parallel.engine.losses) if not _is_number(float(part))]
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


def _is_number(value: float) -> bool:
    return value - value == 0
