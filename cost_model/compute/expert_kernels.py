"""Kernels of a layer of experts beside its two products: how many there are, and what those between them move."""

from __future__ import annotations

from torch import fx

from autopar.cost_model.compute.traffic import WORK, MovedTensor
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.graph import tensor_operands
from autopar.ir.ops.scalings import Scaling
from autopar.ir.precision import itemsize_of
from autopar.ir.rules.call import call_of

# Kernels around the two products, forward and backward; and those of a product of one expert where our own runtime has
# no kernel for all of them (``ir.ops.expert_ffn`` has one in bf16 on GPUs): selecting rows and weight, transposing,
# product, and backward both gradients.
AROUND_EXPERTS = (12, 12)
_OF_AN_EXPERT = (4, 8)
# In narrow floats each operand is cast, too.
_OF_A_SCALED = (22, 44)
_PRODUCTS = 2

# Bytes an element of rows of experts in narrow floats: the rows of an expert are padded to a multiple of 16, and the
# padding is taken away afterwards; read and written.
_PADDED = 4.0
# Kernels of such a cast for one expert: the maximum, set to zero and found, the scale, and the rows in both orders.
_KERNELS_OF_CAST = 4


def launches_of_expert(node: fx.Node, device: Device, precision: str, scaling: Scaling | None) -> tuple[int, int]:
    """Kernels of one expert, forward and backward, where there is none for all of them at once."""
    stack = device.stack
    if device.is_cpu or precision != "bf16" or (scaling is not None and not stack.casts_once):
        forward, backward = _OF_AN_EXPERT if scaling is None else _OF_A_SCALED
        return _PRODUCTS * forward, _PRODUCTS * backward
    if not stack.expert_by_expert:
        return 0, 0
    casts = 0 if scaling is None else _KERNELS_OF_CAST
    products = _PRODUCTS * (1 + casts), _PRODUCTS * (2 + casts)
    if call_of(node).bound()["b_down"] is None:
        return products
    return products[0] + stack.launches_of_bias[0], products[1] + stack.launches_of_bias[1]


def between_products(
    node: fx.Node, precision: str, batch_factor: str | None, stack: Stack, *, scaled: bool = False
) -> tuple[MovedTensor, MovedTensor]:
    """What kernels between the products of experts move, forward and backward: rows gathered, biases added, activation,
    weighted, added up. Where a stack fuses, the activation is one kernel, which weights too, and so are both ways of
    the rows. scaled: whether the products are in narrow floats, so that rows
    are padded; what casts move is apart (``casts_of_experts``).
    """
    x, index, _, up, down = (operand.meta["val"] for operand in tensor_operands(node)[:5])
    hidden, wide, inner = x.shape[-1], up.shape[1], down.shape[2]
    gate = wide - inner
    row = index.numel() * itemsize_of(x.dtype, precision)
    if stack.fuses:
        forward, backward = 3 * hidden + 2 * inner + gate, 3 * hidden + 3 * inner + 2 * gate
    else:
        forward, backward = 7 * hidden + 2 * inner + 3 * gate, 9 * hidden + 3 * inner + 5 * gate
    given = call_of(node).bound()
    others = [
        (size, kernels)
        for name, size, kernels in zip(("b_up", "b_down"), (wide, hidden), stack.expert_biases, strict=True)
        if given[name] is not None
    ]
    if scaled:
        others.append((2 * hidden, (_PADDED, _PADDED)))
    first, second = (
        MovedTensor(
            float(row * width + index.numel() * sum(size * kernels[way] for size, kernels in others)),
            frozenset({WORK}),
            batch_factor is not None,
        )
        for way, width in enumerate((forward, backward))
    )
    return first, second
