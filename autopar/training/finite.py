"""A loss that is not finite is said, with where it came from; parameters that are not are never saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.errors import AutoparError
from autopar.ir.parameters import local_of
from autopar.runtime.module import ParallelModule


class NotFinite(AutoparError):
    """A number of training is infinite or not a number."""


_TRY = "try: a smaller --lr, or a look at the data of this step"


def check_finite(parallel: ParallelModule, loss: torch.Tensor, step: int, saved_in: str | None) -> None:
    """Raise NotFinite, on every rank, if the loss of a step is not finite. All ranks call together.

    Before the optimiser has read its gradients, so that the parameters are still those of the step before.
    """
    value = float(loss)
    if not _is_number(value):
        kept = "" if saved_in is None else f"\n  the checkpoint in {saved_in}, if there is one, is kept as it was"
        raise NotFinite(f"step {step}: the loss is {value}.{_where(parallel)}{kept}\n  {_TRY}")


def check_parameters(parallel: ParallelModule, step: int, saved_in: str) -> None:
    """Raise NotFinite, on every rank, if a parameter is not finite and so not to be saved. All ranks call together."""
    for rank, names in enumerate(_gathered(_not_finite(parallel))):
        if names:
            raise NotFinite(
                f"step {step}: {len(names)} parameters are not finite on rank {rank}, the first is {names[0]}; "
                f"nothing is saved, and the checkpoint in {saved_in}, if there is one, is kept as it was.\n  {_TRY}"
            )


def _where(parallel: ParallelModule) -> str:
    """Which parameters, and the losses of which microbatches, are not finite on which ranks."""
    microbatches = [number for number, part in enumerate(parallel.engine.losses) if not _is_number(float(part))]
    lines = []
    for rank, (names, numbers) in enumerate(_gathered((_not_finite(parallel), microbatches))):
        if names:
            lines.append(f"\n  on rank {rank} {len(names)} parameters are not finite, the first is {names[0]}")
        if numbers:
            which = ", ".join(map(str, numbers))
            lines.append(f"\n  on rank {rank}, which has the last stage, the loss of microbatch {which} is not finite")
    return "".join(lines[:8])


def _not_finite(parallel: ParallelModule) -> list[str]:
    def finite(tensor: torch.Tensor) -> bool:
        part = local_of(tensor.detach())
        return not part.is_floating_point() or bool(torch.isfinite(part).all())

    return [name for name, parameter in parallel.named_parameters() if not finite(parameter)]


def _gathered(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _is_number(value: float) -> bool:
    return value - value == 0
