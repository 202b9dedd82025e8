"""The bytes that an op moves on one rank: its operands and results, and tensors between kernels of a composite op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.compute.scans import elements_of_scan, is_scan
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.graph import tensor_operands, tensor_results
from autopar.ir.precision import itemsize_of
from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import call_of

# Ops that run as several kernels over their first operand on a core: bytes an element of it that forward and backward
# move beyond each tensor once (``Stack.extra_bytes`` on a GPU). Cross entropy normalises and then picks. Of rms_norm
# there are squares, their mean, the two products; backward seven kernels that read or write 19 tensors.
_EXTRA_BYTES_ON_CPU = {"cross_entropy": (12.0, 16.0), "rms_norm": (20.0, 64.0)}

# Ops that take an exponential, a hyperbolic tangent or the like of each element of their first operand: time of an
# element, forward and backward, over that of a GELU by tanh. Measured on a core with AVX-512, where most of them are
# vectors and hardly take longer than their memory. Another GELU than that takes the second figure.
_TRANSCENDENTAL = {
    "cross_entropy": 0.5,
    "elu": 0.7,
    "erf": 0.8,
    "exp": 0.25,
    "gelu": 1.0,
    "log": 0.7,
    "log_softmax": 0.5,
    "mish": 2.5,
    "sigmoid": 0.3,
    "silu": 0.3,
    "softmax": 0.4,
    "softplus": 0.75,
    "tanh": 0.3,
}
_GELU_BY_ERF = 0.4

# An addition reads two tensors and writes one.
PASSES_OF_ADDITION = 3

# Bytes an element of rows of experts in 8-bit floats. Each product's rows are cast by themselves: their maximum is read
# (2), they are read again (2) and written in both orders (1 + 1). Before all, the rows of an expert are padded to a
# multiple of 16, and what is left of that afterwards: read and written.
_CAST, _PADDED = 6.0, 4.0
# Kernels of such a cast for one expert: the maximum, set to zero and found, the scale, and the rows in both orders.
_KERNELS_OF_CAST = 4

# Stands for all factors of an op: a tensor "over" it is divided wherever the work is.
WORK = "*"


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """Bytes of a tensor of the whole batch, and of an element of it where that is known; the factors it runs over."""

    num_bytes: float
    factors: frozenset[str]
    carries_batch: bool
    itemsize: int = 1

    def local(self, degrees: dict[str, int], num_microbatches: int) -> float:
        """Bytes on one rank of one microbatch, where the op's factors have these degrees."""
        divisor = num_microbatches if self.carries_batch else 1
        for factor, degree in degrees.items():
            if factor in self.factors:
                divisor *= degree
        return self.num_bytes / divisor


def moved_tensor(value: torch.Tensor, factors: TensorFactors, precision: str, batch_factor: str | None) -> MovedTensor:
    """A tensor with the factors of its dimensions, in the precision of compute."""
    names = frozenset(f for dim in factors for f in dim)
    itemsize = itemsize_of(value.dtype, precision)
    carries_batch = batch_factor is not None and batch_factor in names
    return MovedTensor(float(value.numel() * itemsize), names, carries_batch, itemsize)


def transcendental_elements(node: fx.Node, rule: FactorRule, batch_factor: str | None) -> MovedTensor | None:
    """Elements that an op takes an exponential or the like of, weighted by how long one takes."""
    weight = _TRANSCENDENTAL.get(op_name(node))
    if weight is None:
        return None
    if op_name(node) == "gelu" and node.kwargs.get("approximate", "none") != "tanh":
        weight = _GELU_BY_ERF
    names = frozenset(f for dim in rule.operands[0] for f in dim)
    return MovedTensor(weight * tensor_operands(node)[0].meta["val"].numel(), names, batch_factor in names)


def extra_passes(
    node: fx.Node, rule: FactorRule, device: Device, precision: str, batch_factor: str | None
) -> tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]:
    """Passes over memory of the kernels inside a composite op, forward and backward."""
    if is_scan(node):
        width = itemsize_of(tensor_results(node)[0].dtype, precision)
        first, second = (
            MovedTensor(n * width, frozenset({WORK}), batch_factor is not None) for n in elements_of_scan(node)
        )
        return (first,), (second,)
    widths = (_EXTRA_BYTES_ON_CPU if device.is_cpu else device.stack.extra_bytes).get(op_name(node))
    if widths is None:
        return (), ()
    numel = tensor_operands(node)[0].meta["val"].numel()
    names = frozenset(f for dim in rule.operands[0] for f in dim)
    forward, backward = (MovedTensor(numel * width, names, batch_factor in names) for width in widths)
    return (forward,), (backward,)


def between_products(
    node: fx.Node, precision: str, batch_factor: str | None, stack: Stack, *, eight_bits: bool = False
) -> tuple[MovedTensor, MovedTensor]:
    """What kernels between the products of experts move, forward and backward: rows gathered, biases added, activation,
    weighted, added up. Where a stack fuses, the activation is one kernel, which weights too, and so are both ways of
    the rows. eight_bits: whether rows are cast for products in 8-bit floats.
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
    if eight_bits:
        others += [(2 * hidden, (_PADDED, _PADDED)), (hidden + inner, (_CAST, 0.0)), (wide + hidden, (0.0, _CAST))]
    first, second = (
        MovedTensor(
            float(row * width + index.numel() * sum(size * kernels[way] for size, kernels in others)),
            frozenset({WORK}),
            batch_factor is not None,
        )
        for way, width in enumerate((forward, backward))
    )
    return first, second


def launches_of_expert(node: fx.Node, stack: Stack, *, eight_bits: bool) -> tuple[int, int]:
    """Kernels of one expert, forward and backward, where a stack has none for all of them at once."""
    if not stack.expert_by_expert:
        return 0, 0
    casts = _KERNELS_OF_CAST if eight_bits else 0
    products = 2 * (1 + casts), 2 * (2 + casts)
    if call_of(node).bound()["b_down"] is None:
        return products
    return products[0] + stack.launches_of_bias[0], products[1] + stack.launches_of_bias[1]
