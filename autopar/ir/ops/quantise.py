"""Operands of a product as narrow floats with their scales.

An operand a (r, d) of a product a b^T is divided into tiles, each with one scale: the whole of it, a row, some
neighbours of a row, or a square. A scale is ``limit / maximum``, so that the largest number of a tile becomes the
largest that there is.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.ops.narrow_tensor import NarrowTensor
from autopar.ir.ops.scalings import E4M3, Format, Scaling

# The exponent of a float32.
_EXPONENT = 0x7F800000


class Quantised(NamedTuple):
    """values: (r, d), of a narrow dtype, contiguous, of so many bits on a device that has them. inverse: float32, by
    which they are multiplied: () for the tensor, (r, 1) by row, (tiles of rows, tiles of d) by tile. tile: rows and
    numbers of a row that share one, if by tile. whole: (), by which all are multiplied too."""

    values: Tensor
    inverse: Tensor
    tile: tuple[int, int] | None = None
    whole: Tensor | None = None
    bits: int = 8


def largest_of(matrix: Tensor, *, by_row: bool) -> Tensor:
    """The largest magnitude of a matrix (r, d), float32: () of all of it, or (r, 1) of each row."""
    if matrix.shape[0] == 0 or matrix.shape[1] == 0:  # a rank without rows
        return matrix.new_zeros((matrix.shape[0], 1) if by_row else (), dtype=torch.float32)
    along = {"dim": 1, "keepdim": True} if by_row else {}
    found: Tensor = torch.linalg.vector_norm(matrix, inf, **along)
    return found.float()


def quantised(matrix: Tensor, largest: Tensor | None, form: Format, scaling: Scaling, *, weight: bool) -> Quantised:
    """A matrix (r, d) rounded to ``form``. largest: what ``largest_of`` found over all ranks, if scales need it."""
    if isinstance(matrix, NarrowTensor):
        return Quantised(matrix.floats.contiguous(), _scale(matrix.largest, form, scaling).reciprocal())
    if scaling.reach == "tile":
        return _by_tile(matrix, largest, form, scaling, scaling.tile if weight and scaling.square_weights else 1)
    assert largest is not None, "scales by tensor and by row are taken over ranks"
    scale = _scale(largest, form, scaling)
    # The scale has two dimensions, so that the product is in float32; it is rounded as it is written. Nothing is beyond
    # the limit, but by less than rounds back to it.
    if scaling.steps:  # there may be larger numbers than in the steps before
        values = (matrix * scale.reshape(-1, 1)).clamp(-form.limit, form.limit).to(form.dtype)
    elif torch.compiler.is_compiling():  # which fuses the two, and cannot write in another order than rows
        values = (matrix * scale.reshape(-1, 1)).to(form.dtype)
    else:
        values = torch.mul(matrix, scale.reshape(-1, 1), out=torch.empty_like(matrix, dtype=form.dtype))
    return Quantised(values.contiguous(), scale.reciprocal())


def _scale(largest: Tensor, form: Format, scaling: Scaling) -> Tensor:
    """What numbers are multiplied by, float32. largest: float32 magnitudes."""
    # In float64, whose quotient is the same op by op and compiled once it is rounded to float32.
    scale = (form.limit / largest.double().clamp(min=scaling.least)).float()
    return _power_of_two(scale) if scaling.power_of_two else scale


def _power_of_two(number: Tensor) -> Tensor:
    """The largest power of two that is no larger."""
    return number.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)


def _by_tile(matrix: Tensor, of_tensor: Tensor | None, form: Format, scaling: Scaling, rows: int) -> Quantised:
    """of_tensor: largest magnitude, where there are two levels. rows: of a tile."""
    tiles = _tiled(matrix, (rows, scaling.tile))
    largest = tiles.abs().amax((1, 3)) if tiles.numel() else tiles.new_zeros(tiles.shape[0], tiles.shape[2])
    if of_tensor is None:
        whole, scale = None, _scale(largest.float(), form, scaling)
        inverse = scale.reciprocal()
    else:
        whole = of_tensor.clamp(min=scaling.least) / (form.limit * E4M3.limit)
        inverse = (largest.float() / form.limit / whole).clamp(torch.finfo(E4M3.dtype).tiny, E4M3.limit)
        inverse = inverse.to(E4M3.dtype).float()
        scale = whole.reciprocal() / inverse
    values = _rounded(tiles * scale[:, None, :, None], form)
    r, d = matrix.shape
    found = values.reshape(tiles.shape[0] * rows, tiles.shape[2] * scaling.tile)[:r, :d]
    return Quantised(found.contiguous(), inverse, (rows, scaling.tile), whole, form.bits)


def _rounded(numbers: Tensor, form: Format) -> Tensor:
    """The nearest numbers of a format, of two as near the one whose last bit is 0."""
    if form.bits == 8:
        return numbers.to(form.dtype)
    numbers = numbers.clamp(-form.limit, form.limit)
    magnitude = numbers.abs()
    # E2M1 has two numbers between powers of two, and as many between 0 and 1.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(numbers / step) * step).to(form.dtype)


def _tiled(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
    """A matrix (r, d) as (tiles of rows, rows, tiles of d, numbers of a row), filled up with zeros."""
    rows, depth = tile
    below, behind = -matrix.shape[0] % rows, -matrix.shape[1] % depth
    if below or behind:
        matrix = F.pad(matrix, (0, behind, 0, below))
    return matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // depth, depth)


def dequantised(operand: Quantised, dtype: torch.dtype) -> Tensor:
    """What an operand stands for, (r, d), in ``dtype``."""
    values = operand.values.to(dtype)
    if operand.tile is None:
        return values * operand.inverse
    rows, depth = operand.tile
    r, d = values.shape
    inverse = operand.inverse.repeat_interleave(rows, 0)[:r].repeat_interleave(depth, 1)[:, :d]
    return values * (inverse if operand.whole is None else inverse * operand.whole)
