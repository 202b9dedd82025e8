"""What it takes to turn the operands of a matrix product into 8-bit floats.

    eager        the largest magnitude, times the scale, limited, rounded: four kernels over the operand
    fused        the largest magnitude, and all else in one kernel

Each operand of each of the three products of a linear layer is cast anew: backward needs other rows of what forward
cast, or the other order in memory. On an H200 both forms of 8192 x 14336 numbers in bfloat16 took 0.76 to 0.88 and
0.12 to 0.21 ms (``benchmarks/kernels.py``); these passes take 0.69 and 0.15 ms at the bandwidth of elementwise kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model.compute.traffic import MovedTensor
from autopar.cost_model.hardware.device import Device

# Bytes of an element beside two reads of it: its product with the scale in float32 is written, limited in place and
# read; what is rounded is written; and copied once more where the operand is transposed.
_WIDE = 4.0 + 8.0 + 4.0
_NARROW = 1.0
# Kernels over an operand, and on its scale alone.
_EAGER, _FUSED = 9, 2

Casts = tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]


def casts_of_product(
    read: Sequence[MovedTensor], result: MovedTensor, differentiable: Sequence[int], device: Device
) -> Casts:
    """Bytes moved by the casts of a linear layer, forward and backward: of each operand of each product.

    read: input and weight first. result: whose gradient is as large. differentiable: positions of the operands that
    have a gradient.
    """
    rows, weight = read[:2]
    backward = (result, weight) * (0 in differentiable) + (result, rows) * (1 in differentiable)
    forward_casts, backward_casts = (
        tuple(_cast(tensor, device) for tensor in tensors) for tensors in ((rows, weight), backward)
    )
    return forward_casts, backward_casts


def _cast(tensor: MovedTensor, device: Device) -> MovedTensor:
    beside = _NARROW if device.stack.fuses else _WIDE + 2 * _NARROW
    return replace(tensor, num_bytes=tensor.num_bytes * (2 + beside / tensor.itemsize))


def launches_of_product(launches: tuple[int, int], casts: Casts, device: Device) -> tuple[int, int]:
    """Kernels of a linear layer in 8-bit floats. launches: of its products."""
    each = _FUSED if device.stack.fuses else _EAGER
    forward, backward = (own + each * len(tensors) for own, tensors in zip(launches, casts, strict=True))
    return forward, backward
