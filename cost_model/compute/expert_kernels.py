"""Kernels of a layer of experts beside its two products: how many there are, and how long those between them take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.compute.traffic import WORK, Function, MovedTensor, function_time
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.hardware.functions import FUNCTIONS
from autopar.ir.gates import functions_of
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
    if not _one_kernel(device, precision) or (scaling is not None and not stack.casts_once):
        forward, backward = _OF_AN_EXPERT if scaling is None else _OF_A_SCALED
        return _PRODUCTS * forward, _PRODUCTS * backward
    if not stack.expert_by_expert:
        return 0, 0
    casts = 0 if scaling is None else _KERNELS_OF_CAST
    products = _PRODUCTS * (1 + casts), _PRODUCTS * (2 + casts)
    if call_of(node).bound()["b_down"] is None:
        return products
    return products[0] + stack.launches_of_bias[0], products[1] + stack.launches_of_bias[1]


@dataclass(frozen=True, slots=True)
class BetweenProducts:
    """What runs between the products of experts: bytes that its kernels move, forward and backward, and the functions
    that they take of elements."""

    moved: tuple[MovedTensor, MovedTensor]
    functions: tuple[Function, ...]

    def time(self, device: Device, degrees: dict[str, int], num_microbatches: int, most: float) -> OpTime:
        """Seconds of one microbatch on the rank that has ``most`` times the mean of the rows.

        On a core an activation takes its function and its memory one after the other, as what it reads is a half of
        each row of the first product: reading ahead ends at every row (measured: SiLU of 25 MiB in order 0.3 ns an
        element, of such halves 0.6, of which the function is 0.23 and the memory 0.33).
        """
        forward, backward = (most * device.memory_seconds(own.local(degrees, num_microbatches)) for own in self.moved)
        for function in self.functions:
            taken, taken_back = function_time(function, device, degrees, num_microbatches)
            forward, backward = forward + most * taken, backward + most * taken_back
        return OpTime(forward, backward)

    @classmethod
    def of(
        cls, node: fx.Node, precision: str, batch_factor: str | None, device: Device, *, scaled: bool = False
    ) -> BetweenProducts:
        """Rows gathered, biases added, activation, weighted, added up. Where a stack fuses, the activation is one
        kernel, which weights too, and so are both ways of the rows. Where each expert has a product of its own, the
        rows of all of them are put together after each. scaled: whether the products are in narrow floats, so that rows
        are padded; what casts move is apart (``casts_of_experts``).
        """
        x, index, _, up, down = (operand.meta["val"] for operand in tensor_operands(node)[:5])
        hidden, wide, inner = x.shape[-1], up.shape[1], down.shape[2]
        gate = wide - inner
        row = index.numel() * itemsize_of(x.dtype, precision)
        stack, batched, given = device.stack, batch_factor is not None, call_of(node).bound()
        if stack.fuses:
            forward, backward = 3 * hidden + 2 * inner + gate, 3 * hidden + 3 * inner + 2 * gate
        else:
            forward, backward = 7 * hidden + 2 * inner + 3 * gate, 9 * hidden + 3 * inner + 6 * gate
        if not (scaled or _one_kernel(device, precision)):
            # Backward the gradients of gate and value are put together.
            forward, backward = forward + 2 * wide + 2 * hidden, backward + 4 * gate
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
                batched,
            )
            for way, width in enumerate((forward, backward))
        )
        elements = MovedTensor(float(index.numel() * inner), frozenset({WORK}), batched)
        taken = [name for own in functions_of(given["activation"]) for name in FUNCTIONS if name == own]
        return cls((first, second), tuple(Function(name, elements) for name in taken))


def _one_kernel(device: Device, precision: str) -> bool:
    """Whether one kernel computes a product of all experts."""
    return not device.is_cpu and precision == "bf16"
