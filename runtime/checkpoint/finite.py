"""Parameters that are not finite are never saved: what training could go on from is not replaced by what it cannot."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import NotFinite
from autopar.ir.primitives.read_parameter import local_of


def check_finite_parameters(pm: nn.Module, path: str | os.PathLike[str], step: int | None = None) -> None:
    """Raise NotFinite, on every rank, if a parameter that trains is not finite. All ranks call together.

    path: of the folder that is to be written. step: the steps that are done, to be told.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, not_finite(pm))
    at = "" if step is None else f"step {step}: "
    for rank, names in enumerate(found):
        if names:
            raise NotFinite(
                f"{at}{len(names)} parameters are not finite on rank {rank}, the first is {names[0]}; nothing is "
                f"saved, and what is in {path}, if anything, is kept.\n"
                "  try: the last checkpoint and a smaller learning rate; full_state_dict() to look at the parameters"
            )


def not_finite(pm: nn.Module) -> list[str]:
    """Names of the parameters that train of which this rank's part is not finite."""

    def finite(tensor: torch.Tensor) -> bool:
        return bool(torch.isfinite(local_of(tensor.detach())).all())

    return [name for name, parameter in pm.named_parameters() if parameter.requires_grad and not finite(parameter)]
