"""Collectives of what products read as 8-bit floats by one scale: quantised first, and gathered in 8 bits.

    h  = all_gather(x, dim=1, group='tp', backward='reduce_scatter')
    h' = narrow_all_gather(x, .., recipe='fp8-tensor', maxima_groups=('dp', 'tp'))         scaled_linear(h', w, ..)

    z  = reduce_scatter(y, dim=1, group='tp')
    z  = narrowing_reduce_scatter(y, .., recipe='fp8-tensor', maxima_groups=('dp', 'tp'))  y = scaled_linear(x, w, ..)

The first gathers forward in 8 bits, the second backward. ``maxima_groups`` hold pieces of what is gathered: the largest
magnitude is taken over all of them. What is gathered is a ``NarrowTensor``, which products alone read.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from autopar.ir.ops.narrow_tensor import NarrowTensor
from autopar.ir.ops.quantise import quantised
from autopar.ir.ops.scalings import SCALINGS, Format, Recipe, Scaling
from autopar.ir.ops.shared_maxima import Groups, Side, shared_maxima
from autopar.ir.primitives.collectives import apply, communicates_backward
from autopar.ir.primitives.group_communication import group_all_gather, group_reduce_scatter, own_piece


def narrow_all_gather(
    x: Tensor,
    *,
    dim: int,
    group: str,
    backward: Literal["split", "reduce_scatter"] = "split",
    recipe: Recipe,
    maxima_groups: tuple[str, ...],
) -> Tensor:
    """``all_gather`` in 8 bits."""
    return cast(Tensor, apply(_NarrowAllGather, x, dim, group, backward, recipe, maxima_groups))


def narrowing_reduce_scatter(
    x: Tensor, *, dim: int, group: str, recipe: Recipe, maxima_groups: tuple[str, ...]
) -> Tensor:
    """``reduce_scatter``, whose gradient is gathered in 8 bits."""
    return cast(Tensor, apply(_NarrowingReduceScatter, x, dim, group, recipe, maxima_groups))


def _gathered(x: Tensor, dim: int, group: str, form: Format, scaling: Scaling, groups: Groups) -> NarrowTensor:
    matrix = x.reshape(-1, x.shape[-1])
    (largest,) = shared_maxima([Side(matrix, groups, ())], scaling)
    assert largest is not None, "of a recipe with one scale"
    floats = quantised(matrix, largest, form, scaling, weight=False).values
    # As bytes, which every transport knows.
    found = group_all_gather(floats.view(torch.uint8).view(x.shape), dim, group)
    return NarrowTensor(found.view(form.dtype), largest, x.dtype)


class _NarrowAllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: str, backward: str, recipe: Recipe, maxima_groups: Groups
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.conjugate = dim, group, backward
        if backward == "reduce_scatter":
            communicates_backward(ctx)
        scaling = SCALINGS[recipe]
        return _gathered(x, dim, group, scaling.value, scaling, maxima_groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = group_reduce_scatter if ctx.conjugate == "reduce_scatter" else own_piece
        return back(grad, ctx.dim, ctx.group), None, None, None, None, None


class _NarrowingReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, recipe: Recipe, maxima_groups: Groups) -> Tensor:
        ctx.dim, ctx.group, ctx.scaling, ctx.groups = dim, group, SCALINGS[recipe], maxima_groups
        communicates_backward(ctx)
        return group_reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _gathered(grad, ctx.dim, ctx.group, ctx.scaling.gradient, ctx.scaling, ctx.groups)
        return found, None, None, None, None
