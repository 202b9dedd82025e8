"""Products of matrices in 8-bit floats, with their gradients, by a recipe.

    y  = x  w^T        x (m, k), w (n, k)        each product is of the form a (r, d), b (c, d) -> a b^T. Both operands
    gx = g  w          g (m, n), w^T (k, n)      are scaled into the range of an 8-bit float and rounded to it, by one
    gw = g^T x         g^T (n, m), x^T (k, m)    scale for the tensor, or one for each of their rows

A scale follows from the largest magnitude of what it is for. Where ranks hold pieces of that, they take the maximum
over all of them, so that each rounds as one process would: ``rows``, ``depth`` and ``columns`` name the groups of ranks
that hold pieces of m, k and n.

The recipes are those of torchao's float8 training: "fp8-tensor" is its tensorwise scaling, "fp8-row" its rowwise one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.primitives.collectives import apply, communicates_backward
from autopar.ir.primitives.group_communication import group_all_reduce

Recipe = Literal["fp8-tensor", "fp8-row"]

# What sizes of a product have to be multiples of: units for 8-bit floats read 16 bytes at once.
MULTIPLE = 16
# The least magnitude that a scale is computed of.
_LEAST = 1e-12
# The exponent of a float32.
_EXPONENT = 0x7F800000
# The first devices with products of these 8-bit floats: NVIDIA's Ada, AMD's CDNA 4 (CDNA 3 has others).
_CAPABILITY = (9, 5) if torch.version.hip else (8, 9)

_Groups = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What a recipe says. gradient: dtype of gradients; other tensors are float8_e4m3fn. by_row: a scale for each row,
    along the dimension that is summed; else one for the tensor. power_of_two: scales are rounded down to one."""

    gradient: torch.dtype
    by_row: bool
    power_of_two: bool


SCALINGS: dict[Recipe, Scaling] = {
    "fp8-tensor": Scaling(gradient=torch.float8_e5m2, by_row=False, power_of_two=False),
    "fp8-row": Scaling(gradient=torch.float8_e4m3fn, by_row=True, power_of_two=True),
}


def scaled_product(
    x: Tensor, weight: Tensor, recipe: Recipe, rows: _Groups, depth: _Groups, columns: _Groups
) -> Tensor:
    """``x @ weight.T`` by ``recipe``. x: (m, k). weight: (n, k). Result: (m, n), of x's dtype; partial over ``depth``.

    rows, depth, columns: groups of ranks that hold pieces of m, k and n.
    """
    result: Tensor = apply(_ScaledProduct, x, weight, recipe, rows, depth, columns)
    return result


class _Side(NamedTuple):
    """One operand of a product. matrix: (r, d). rows, depth: groups that hold pieces of r and d."""

    matrix: Tensor
    rows: _Groups
    depth: _Groups


class _Quantised(NamedTuple):
    """values: (r, d), of an 8-bit dtype, contiguous. inverse: (r, 1) or (), by which they are multiplied."""

    values: Tensor
    inverse: Tensor


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, rows: _Groups, depth: _Groups, columns: _Groups
    ) -> Tensor:
        scaling = SCALINGS[recipe]
        sides = _Side(x, rows, depth), _Side(weight, columns, depth)
        largest = _largest(sides, scaling)
        first, second = (
            _quantised(side.matrix, own, torch.float8_e4m3fn, scaling) for side, own in zip(sides, largest, strict=True)
        )
        ctx.scaling, ctx.groups = scaling, (rows, depth, columns)
        # Of rows there are others in backward, along another dimension.
        ctx.save_for_backward(x, weight, *([] if scaling.by_row else largest))
        # Its two gradients share what is computed, and what is sent, so both are in one part of a split backward.
        communicates_backward(ctx)
        return _product(first, second, x.dtype, scaling, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, *known), scaling, (rows, depth, columns) = ctx.saved_tensors, ctx.scaling, ctx.groups
        of_x, of_weight = ctx.needs_input_grad[:2]
        sides: list[_Side] = []
        if of_x:
            sides += _Side(grad, rows, columns), _Side(weight.t(), depth, columns)
        if of_weight:
            sides += _Side(grad.t(), columns, rows), _Side(x.t(), depth, rows)
        if scaling.by_row:
            largest = _largest(sides, scaling)
        else:
            (of_grad,) = _largest([_Side(grad, rows, columns)], scaling)
            largest = [of_grad, known[1]] * of_x + [of_grad, known[0]] * of_weight
        dtypes = (scaling.gradient, torch.float8_e4m3fn) * 2
        quantised = [
            _quantised(side.matrix, own, dtype, scaling)
            for side, own, dtype in zip(sides, largest, dtypes, strict=False)
        ]
        products = [
            _product(first, second, x.dtype, scaling, fast=False)
            for first, second in zip(quantised[::2], quantised[1::2], strict=True)
        ]
        grad_x = products[0] if of_x else None
        grad_weight = products[-1] if of_weight else None
        return grad_x, grad_weight, None, None, None, None


def _largest(sides: Sequence[_Side], scaling: Scaling) -> list[Tensor]:
    """The largest magnitudes of each operand, over all ranks that hold pieces of it: (r, 1) each by row, else ()."""
    found = [_largest_here(side.matrix, scaling) for side in sides]
    groups = [side.depth if scaling.by_row else (*side.rows, *side.depth) for side in sides]
    for group in dict.fromkeys(group for own in groups for group in own):
        numbers = [number for number, own in enumerate(groups) if group in own]
        pieces = [found[number].reshape(-1) for number in numbers]
        together = group_all_reduce(torch.cat(pieces), group, "max")
        for number, piece in zip(numbers, together.split([piece.numel() for piece in pieces]), strict=True):
            found[number] = piece.view_as(found[number])
    return found


def _largest_here(matrix: Tensor, scaling: Scaling) -> Tensor:
    if matrix.shape[0] == 0 or matrix.shape[1] == 0:  # a rank without rows
        return matrix.new_zeros((matrix.shape[0], 1) if scaling.by_row else (), dtype=torch.float32)
    along = {"dim": 1, "keepdim": True} if scaling.by_row else {}
    found: Tensor = torch.linalg.vector_norm(matrix, inf, **along)
    return found.float()


def _quantised(matrix: Tensor, largest: Tensor, dtype: torch.dtype, scaling: Scaling) -> _Quantised:
    limit = torch.finfo(dtype).max
    # In float64, whose quotient is the same op by op and compiled once it is rounded to float32.
    scale = (limit / largest.double().clamp(min=_LEAST)).float()
    if scaling.power_of_two:
        scale = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    # The scale has two dimensions, so that the product is in float32; it is rounded as it is written. Nothing is beyond
    # the limit, but by less than rounds back to it.
    if torch.compiler.is_compiling():  # which fuses the two, and cannot write in another order than rows
        values = (matrix * scale.reshape(-1, 1)).to(dtype)
    else:
        values = torch.mul(matrix, scale.reshape(-1, 1), out=torch.empty_like(matrix, dtype=dtype))
    return _Quantised(values.contiguous(), scale.reciprocal())


def _product(first: _Quantised, second: _Quantised, dtype: torch.dtype, scaling: Scaling, *, fast: bool) -> Tensor:
    """(r, c) of (r, d) and (c, d). fast: partial sums may have fewer digits than float32, where a device does so."""
    if not _has_units(first.values.device, dtype, scaling):
        wide = torch.promote_types(dtype, torch.float32)
        return reference_product(first, second, wide).to(dtype)
    kind = F.ScalingType.RowWise if scaling.by_row else F.ScalingType.TensorWise
    a, b = (_padded(own.values) for own in (first, second))
    inverse = second.inverse.t() if scaling.by_row else second.inverse
    return F.scaled_mm(a, b.t(), first.inverse, kind, inverse, kind, output_dtype=dtype, use_fast_accum=fast)


def reference_product(first: _Quantised, second: _Quantised, dtype: torch.dtype) -> Tensor:
    """The product in ``dtype`` of what the 8-bit operands stand for, as every device has it."""
    a, b = (own.values.to(dtype) * own.inverse for own in (first, second))
    return a @ b.t()


def _has_units(device: torch.device, dtype: torch.dtype, scaling: Scaling) -> bool:
    """Whether ``F.scaled_mm`` runs on a device, for a result of a dtype. By row GPUs write bfloat16 alone."""
    if device.type != "cuda":
        return device.type == "cpu" and dtype != torch.float64 and _ON_CPU
    capable = torch.cuda.get_device_capability(device) >= _CAPABILITY
    return capable and (dtype == torch.bfloat16 or not scaling.by_row)


def _runs_on_cpu() -> bool:
    """Whether this torch has the product for CPUs: 2.11 has not."""
    eight, one = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(())
    kind = F.ScalingType.TensorWise
    try:
        F.scaled_mm(eight, eight.t(), one, kind, one, kind, output_dtype=torch.float32)
    except NotImplementedError:  # what torch raises where a device has no kernel for an op
        return False
    return True


_ON_CPU = _runs_on_cpu()


def _padded(values: Tensor) -> Tensor:
    """With zeros up to a multiple of what a GPU reads at once along the dimension that is summed."""
    missing = -values.shape[1] % MULTIPLE
    if not missing or values.device.type != "cuda":
        return values
    padded = values.new_zeros(values.shape[0], values.shape[1] + missing)
    padded[:, : values.shape[1]] = values
    return padded
