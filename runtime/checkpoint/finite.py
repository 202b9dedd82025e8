"""Numbers that are not finite are never saved: what training could go on from is not replaced by what it cannot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import NotFinite
from autopar.ir.primitives.read_parameter import local_of

Tensors = Mapping[str, torch.Tensor]


def check_finite(
    pm: nn.Module,
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    optimizer: Tensors | None = None,
    buffers: Tensors | None = None,
) -> None:
    """Raise NotFinite, on every rank, if training could not go on from what is to be saved. All ranks call together.

    That is if a parameter that trains or a tensor of the ``optimizer`` is infinite or not a number, or one of the
    ``buffers`` that forward writes not a number: a minimum or maximum begins with infinity.
    path: of the folder that is to be written. step: the steps that are done, to be told.
    """
    own = {
        "parameters": not_finite(pm),
        "tensors of the optimiser": [name for name, value in (optimizer or {}).items() if not _is_finite(value)],
        "buffers": [name for name, value in (buffers or {}).items() if bool(torch.isnan(local_of(value)).any())],
    }
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    at = "" if step is None else f"step {step}: "
    for rank, found in enumerate(told):
        for what, names in found.items():
            if names:
                raise NotFinite(
                    f"{at}{len(names)} {what} are not finite on rank {rank}, the first is {names[0]}; nothing is "
                    f"saved, and what is in {path}, if anything, is kept.\n"
                    "  try: the last checkpoint and a smaller learning rate; full_state_dict() to look at the model"
                )


def not_finite(pm: nn.Module) -> list[str]:
    """Names of the parameters that train of which this rank's part is not finite."""
    return [name for name, one in pm.named_parameters() if one.requires_grad and not _is_finite(one)]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(local_of(tensor.detach())).all())
