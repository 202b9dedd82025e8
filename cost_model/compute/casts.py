"""What it takes to turn the operands of a matrix product into floats of 8 bits or fewer.

    the largest magnitude          reads the operand
    times the scale, rounded       reads it, and writes a number of the format and its share of the scale
    in the order of the product    copies that, where the operand is transposed

Run op by op, each operand of each of the three products of a linear layer is cast anew: backward needs other rows of
what forward cast, or the other order in memory. None of it hides behind the product, which comes after.

Compiled, an operand is cast once for all products that read it, and kernels are (pytorch/ao,
torchao/testing/float8/roofline_utils.py, with kernels fused with the op before):

    one scale    rows, gradients   the op before finds the maximum; read, written in both orders
                 weights           read for the maximum; read and written in each order, forward and backward
    of rows      rows, gradients   written in 8 bits, and in the other order as they are; that read, written in 8 bits
                 weights           read and written forward; copied in the other order, read and written backward
                 results backward  read, scaled and written: such products have one scale (pytorch/ao, PR 1325)
    of tiles     rows, gradients   written in both orders
                 weights           read and written in each order, forward and backward

Of a weight that ranks gather in 8 bits (``Stack.gathers_narrow``) each has cast a piece before; what is left is to copy
it in the order of backward's product.

A stack that casts once (``Stack.casts_once``) has what norms make written in 8 bits, which backward transposes; other
inputs and the gradients are each cast and transposed by one kernel, and weights, once a step, are not counted
(NVIDIA/TransformerEngine, transformer_engine/pytorch/module: ``ln_out`` of layernorm_linear.py, ``inputmat`` of
linear.py, ``grad_output_preprocess`` of base.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.cost_model.compute.traffic import WORK, MovedTensor
from autopar.cost_model.hardware.device import Device, MatmulRate
from autopar.ir.graph import tensor_operands
from autopar.ir.ops.scalings import Scaling

# Bytes of an element that torch's own kernels move beyond two reads, in bfloat16: on an H100 all six casts of layers of
# 8,192 x 4,096 x 4,096 to 8,192 x 28,672 x 8,192 took 8.7 to 8.9 ps for each element by tensor, 9.7 to 11.9 by row
# (``benchmarks/eight_bits.py``), of which 26 and 30 bytes in all are made at its bandwidth. Of tiles nothing is
# measured; they are taken to be as rows, since the same kernels read and write as much.
_EAGER = 24.0
# Kernels over an operand, and on its maximum and scale alone.
_KERNELS = 9

Casts = tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]


def casts_of_product(
    read: Sequence[MovedTensor],
    result: MovedTensor,
    differentiable: Sequence[int],
    device: Device,
    scaling: Scaling,
    *,
    shared: bool,
    by_norm: bool = False,
) -> Casts:
    """Bytes moved by the casts of a linear layer, forward and backward: of each operand of each product.

    read: input and weight first. result: whose gradient is as large. differentiable: positions of the operands that
    have a gradient. shared: the input is that of another product, for which it is cast. by_norm: a norm makes it.
    """
    rows, weight = read[:2]
    number = scaling.bytes_of_number
    if device.stack.casts_once:
        return (
            () if shared else (_moving(rows, 0 if by_norm else 1, 2 * number),),
            (_moving(result, 1, 2 * number),) if differentiable else (),
        )
    if device.stack.fuses_casts:
        return _compiled(rows, weight, result, differentiable, scaling, shared=shared)
    reads = 1 if device.is_cpu and (scaling.reach == "tile" or scaling.steps) else 2
    plain, transposed = (number, 3 * number) if device.is_cpu else (_EAGER, _EAGER)
    backward: list[MovedTensor] = []
    if 0 in differentiable:
        backward += _moving(result, reads, plain), _moving(weight, reads, transposed)
    if 1 in differentiable:
        backward += _moving(result, reads, transposed), _moving(rows, reads, transposed)
    return (_moving(rows, reads, plain), _moving(weight, reads, plain)), tuple(backward)


def _compiled(
    rows: MovedTensor,
    weight: MovedTensor,
    result: MovedTensor,
    differentiable: Sequence[int],
    scaling: Scaling,
    *,
    shared: bool,
) -> Casts:
    """The same by kernels that the op before is part of, for all products of an operand; see above."""
    number = scaling.bytes_of_number
    moves = {"tensor": 1, "row": 2, "tile": 0}[scaling.reach]  # of rows and gradients as they are
    forward = [_moving(weight, 2 if scaling.reach == "tensor" and not scaling.steps else 1, number)]
    backward: list[MovedTensor] = []
    if not shared:
        forward.insert(0, _moving(rows, moves, (1 + (1 in differentiable)) * number))
    if differentiable:
        backward.append(_moving(result, moves, len({0, 1} & set(differentiable)) * number))
    if 0 in differentiable:
        backward.append(_moving(weight, 3 if scaling.reach == "row" else 1, number))
    if scaling.reach == "row":
        backward += [_moving((rows, weight)[position], 2, 0) for position in differentiable if position < 2]
    return tuple(forward), tuple(backward)


def spared_by_gather(device: Device, scaling: Scaling, itemsize: int, *, backward: bool) -> tuple[float, float]:
    """Bytes an element of a weight that ``casts_of_product`` counts, forward and backward, and that are not moved where
    ranks gather it in narrow floats. itemsize: of the weight. backward: whether the input has a gradient."""
    if device.stack.casts_once:
        return 0.0, 0.0
    one = MovedTensor(float(itemsize), frozenset(), False, itemsize)
    (*_, ahead), behind = casts_of_product((one, one), one, (0,) if backward else (), device, scaling, shared=False)
    return ahead.num_bytes, behind[1].num_bytes - 2 * scaling.bytes_of_number if backward else 0.0


def casts_of_experts(
    node: fx.Node,
    weights: Sequence[MovedTensor],
    differentiable: Sequence[int],
    device: Device,
    scaling: Scaling,
    itemsize: int,
    *,
    carries_batch: bool,
) -> Casts:
    """The same of the two products of experts. weights: of both. The rows of both, and their gradients, are cast too.

    Where scales are of tiles there is no product of weights' gradients in them.
    """
    x, index, _, up, down = (operand.meta["val"] for operand in tensor_operands(node)[:5])
    widths = x.shape[-1], up.shape[1], down.shape[2], x.shape[-1]
    hidden, wide, inner, out = (
        MovedTensor(float(index.numel() * width * itemsize), frozenset({WORK}), carries_batch, itemsize)
        for width in widths
    )
    of_inputs = [0, *([1] if scaling.reach != "tile" else [])] if differentiable else []
    forward: list[MovedTensor] = []
    backward: list[MovedTensor] = []
    for rows, weight, result in ((hidden, weights[0], wide), (inner, weights[1], out)):
        ahead, behind = casts_of_product((rows, weight), result, of_inputs, device, scaling, shared=False)
        forward += ahead
        backward += behind
    return tuple(forward), tuple(backward)


def slowdown_of_gradients(scaling: Scaling, narrow: MatmulRate, wide: MatmulRate) -> float:
    """Time of the products that give gradients of experts, of what it would be if all of them were in narrow floats.

    Where scales are of tiles, the half of them that is of weights is in the precision of the other ops.
    """
    if scaling.reach != "tile":
        return 1.0
    return 0.5 + 0.5 * (narrow.peak_flops * narrow.efficiency) / (wide.peak_flops * wide.efficiency)


def _moving(tensor: MovedTensor, reads: float, beside: float) -> MovedTensor:
    """What a cast moves. reads: of the tensor as it is. beside: bytes of an element beyond them."""
    return replace(tensor, num_bytes=tensor.num_bytes * (reads + beside / tensor.itemsize))


def launches_of_product(launches: tuple[int, int], casts: Casts) -> tuple[int, int]:
    """Kernels of a linear layer in 8-bit floats. launches: of its products."""
    forward, backward = (own + _KERNELS * len(tensors) for own, tensors in zip(launches, casts, strict=True))
    return forward, backward
