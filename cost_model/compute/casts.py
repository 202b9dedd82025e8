"""What it takes to turn the operands of a matrix product into 8-bit floats.

    the largest magnitude          reads the operand
    times the scale, rounded       reads it, and writes a byte for each element
    in the order of the product    copies that, where the operand is transposed

Each operand of each of the three products of a linear layer is cast anew: backward needs other rows of what forward
cast, or the other order in memory. None of it hides behind the product, which comes after.

A stack that casts once (``Stack.casts_once``) does so where the tensor is made, and transposes it once; its gradient is
cast and transposed by one kernel, and weights, once a step, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model.compute.traffic import MovedTensor

# Kernels over an operand, and on its maximum and scale alone.
_KERNELS = 9

Casts = tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]


def casts_of_product(
    read: Sequence[MovedTensor], result: MovedTensor, differentiable: Sequence[int], *, once: bool, shared: bool
) -> Casts:
    """Bytes moved by the casts of a linear layer, forward and backward: of each operand of each product.

    read: input and weight first. result: whose gradient is as large. differentiable: positions of the operands that
    have a gradient. once: each tensor is cast once. shared: the input is that of another product, which is one with it.
    """
    rows, weight = read[:2]
    if once:
        return (
            () if shared else (replace(rows, num_bytes=rows.num_bytes * 2 / rows.itemsize),),
            (replace(result, num_bytes=result.num_bytes * (1 + 2 / result.itemsize)),) if differentiable else (),
        )
    backward: list[MovedTensor] = []
    if 0 in differentiable:
        backward += _cast(result), _cast(weight, transposed=True)
    if 1 in differentiable:
        backward += _cast(result, transposed=True), _cast(rows, transposed=True)
    return (_cast(rows), _cast(weight)), tuple(backward)


def _cast(tensor: MovedTensor, *, transposed: bool = False) -> MovedTensor:
    written = 3 if transposed else 1
    return replace(tensor, num_bytes=tensor.num_bytes * (2 + written / tensor.itemsize))


def launches_of_product(launches: tuple[int, int], casts: Casts) -> tuple[int, int]:
    """Kernels of a linear layer in 8-bit floats. launches: of its products."""
    forward, backward = (own + _KERNELS * len(tensors) for own, tensors in zip(launches, casts, strict=True))
    return forward, backward
