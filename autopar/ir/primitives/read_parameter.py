"""How a block reads a parameter: as a local tensor in the compute dtype.

A parameter is a DTensor over the tensor axes of its stage mesh, or a plain tensor if there are none. Its local
gradient may be only a summand of the whole one. It is handed back with the parameter's own placements all the
same, and the ranks' summands are added once a step by the runtime, so that nothing is summed per microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.torch_private import local_tensor, placed, placement_of

# A gradient of that size, once summed over ranks, fills the links by itself: smaller ones are copied into buckets.
ALONE_BYTES = 4 << 20


def read_parameter(
    parameter: torch.Tensor, *, dtype: torch.dtype | None = None, grad_scale: float = 1.0
) -> torch.Tensor:
    """The local part of ``parameter``, cast to ``dtype`` (None: its own).

    The gradient is multiplied by ``grad_scale``: ranks that each hold the whole gradient where a later sum
    expects summands divide it first.
    """
    if isinstance(parameter, DTensor):
        result: torch.Tensor = _ReadShard.apply(parameter, dtype, grad_scale)  # type: ignore[no-untyped-call]
        return result
    if grad_scale != 1.0:
        parameter = scale_gradient(parameter, grad_scale)
    return parameter if dtype is None else parameter.to(dtype)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` on this rank: a DTensor's own, or the tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def placed_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` with the placements of ``parameter``, as its gradient."""
    return placed(local, placement_of(parameter)) if isinstance(parameter, DTensor) else local


def scale_gradient(value: torch.Tensor, factor: float) -> torch.Tensor:
    """``value`` itself; its gradient is multiplied by ``factor``."""
    result: torch.Tensor = _ScaleGradient.apply(value, factor)  # type: ignore[no-untyped-call]
    return result


class _ReadShard(torch.autograd.Function):
    """Local tensor of a DTensor; the gradient gets the DTensor's placements whatever its values mean."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, dtype: torch.dtype | None, grad_scale: float) -> torch.Tensor:
        # The spec is kept rather than the tensor: FSDP frees the storage of gathered parameters meanwhile.
        ctx.spec, ctx.own_dtype, ctx.grad_scale = placement_of(parameter), parameter.dtype, grad_scale
        local = local_tensor(parameter)
        return local.view_as(local) if dtype is None or dtype == local.dtype else local.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None, None]:
        if gradient.dtype != ctx.own_dtype:
            gradient = gradient.to(ctx.own_dtype)
        if ctx.grad_scale != 1.0:
            gradient = gradient * ctx.grad_scale
        return placed(gradient, ctx.spec), None, None


class _ScaleGradient(torch.autograd.Function):
    """The tensor itself; its gradient multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, grad_scale: float) -> torch.Tensor:
        ctx.grad_scale = grad_scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.grad_scale, None
