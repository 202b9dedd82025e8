"""Equality of all ranks before a model is divided: versions, the captured model, initial weights."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.runtime.agreement import agree_same
from autopar.runtime.check_sum import check_sum

_SAMPLES = 64  # elements of a tensor that are compared


def check_same_start(model: nn.Module, captured: CapturedModel) -> None:
    """Raise InvalidInput, on every rank, if ranks start from different models. All ranks call together.

    Of each parameter and buffer a check sum is compared, and some elements evenly spread; nothing of those on the meta
    device.
    """
    if dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return
    weights = dict(_digests(model))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    whole = hashlib.sha256(repr(weights).encode()).hexdigest()[:12]
    agree_same(
        {
            "the version of Python": platform.python_version(),
            "the version of torch": torch.__version__,
            "the captured model (fingerprint of its ops and parameters)": captured.fingerprint,
            "the frozen parameters": f"{len(frozen)} ({hashlib.sha256(repr(frozen).encode()).hexdigest()[:12]})",
        },
        "parallelize",
    )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, whole)
    if len(set(found)) == 1:
        return
    rank = next(number for number, digest in enumerate(found) if digest != found[0])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, weights)
    differing = [name for name in everywhere[0] if everywhere[rank].get(name) != everywhere[0][name]]
    raise InvalidInput(
        f"parallelize: the weights that rank {rank} starts from are not those of rank 0: {len(differing)} of "
        f"{len(everywhere[0])} tensors differ, the first is {differing[0] if differing else 'missing on rank 0'}.\n"
        "  expected: the same model on every rank, since each keeps a part of it\n"
        "  try: torch.manual_seed(0) on every rank before the model is built, or the same checkpoint"
    )


def _digests(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            yield name, "on the meta device"
            continue
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].to("cpu").contiguous()
        content = bytes(some.view(torch.uint8).tolist()) + str(check_sum(flat)).encode()
        yield name, hashlib.sha256(content).hexdigest()[:12]
