"""The bytes that an op moves on one rank: its operands and results, and tensors between kernels of a composite op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.compute.scans import elements_of_scan, is_scan
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.hardware.functions import FUNCTIONS, ElementTime, FunctionName
from autopar.ir.graph import tensor_operands, tensor_results
from autopar.ir.mesh import Mesh
from autopar.ir.precision import itemsize_of
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice

# Ops that run as several kernels over their first operand on a core: bytes an element of it that forward and backward
# move beyond each tensor once (``Stack.extra_bytes`` on a GPU). Cross entropy normalises and then picks. Of rms_norm
# there are squares, their mean, the two products; backward seven kernels that read or write 19 tensors.
_EXTRA_BYTES_ON_CPU = {"cross_entropy": (12.0, 16.0), "rms_norm": (20.0, 64.0)}

# Ops that take a function of each element of their first operand, where it has another name.
_FUNCTION_OF = {"cross_entropy": "log_softmax"}

# An addition reads two tensors and writes one.
PASSES_OF_ADDITION = 3

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


def degrees_of(assignment: Assignment, mesh: Mesh) -> dict[str, int]:
    """Ranks that share each factor of an op, and its work."""
    degrees = {WORK: 1}
    for choice, axis in zip(assignment, mesh.axes, strict=True):
        for factor in factors_of_choice(choice):
            degrees[factor] = degrees.get(factor, 1) * axis.size
        if choice is not None and choice[0] != "+":
            degrees[WORK] *= axis.size
    return degrees


def moved_tensor(value: torch.Tensor, factors: TensorFactors, precision: str, batch_factor: str | None) -> MovedTensor:
    """A tensor with the factors of its dimensions, in the precision of compute."""
    names = frozenset(f for dim in factors for f in dim)
    itemsize = itemsize_of(value.dtype, precision)
    carries_batch = batch_factor is not None and batch_factor in names
    return MovedTensor(float(value.numel() * itemsize), names, carries_batch, itemsize)


class Function(NamedTuple):
    """A function that an op takes of elements."""

    name: FunctionName
    elements: MovedTensor

    @classmethod
    def of(cls, node: fx.Node, rule: FactorRule, batch_factor: str | None) -> Function | None:
        """Of an op's first operand; None of one that takes none."""
        name = _FUNCTION_OF.get(op_name(node), op_name(node))
        if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh":
            name = "gelu_tanh"
        if name not in FUNCTIONS:
            return None
        names = frozenset(f for dim in rule.operands[0] for f in dim)
        numel = tensor_operands(node)[0].meta["val"].numel()
        return cls(name, MovedTensor(float(numel), names, batch_factor in names))


def function_time(
    function: Function | None, device: Device, degrees: dict[str, int], num_microbatches: int
) -> ElementTime:
    """Seconds of a function of one microbatch on a rank, forward and backward; 0 without one."""
    if function is None:
        return ElementTime()
    local = function.elements.local(degrees, num_microbatches)
    return ElementTime(*(local * seconds for seconds in device.function_time(function.name)))


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
    return _passes(tensor_operands(node)[0].meta["val"].numel(), rule.operands[0], widths, batch_factor)


def passes_beside(
    node: fx.Node, rule: FactorRule, device: Device, precision: str, batch_factor: str | None
) -> tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]:
    """What is moved beside the one kernel of an op: the rotation of queries or keys, which is counted with
    ``cat(-x2, x1)``, of its size."""
    operands = tensor_operands(node)
    widths = device.stack.rotation_bytes
    if not any(widths) or op_name(node) != "cat" or len(operands) != 2 or op_name(operands[0]) != "neg":
        return (), ()
    return _passes(tensor_results(node)[0].numel(), rule.results[0], widths, batch_factor)


def _passes(
    numel: int, factors: TensorFactors, widths: tuple[float, float], batch_factor: str | None
) -> tuple[tuple[MovedTensor, ...], tuple[MovedTensor, ...]]:
    """``widths`` bytes an element of a tensor, forward and backward."""
    names = frozenset(f for dim in factors for f in dim)
    forward, backward = (MovedTensor(numel * width, names, batch_factor in names) for width in widths)
    return (forward,), (backward,)
