"""What an op takes beside one pass over its memory, or beside its kernel: an operand that lies in another order is
copied, a layer norm takes statistics row by row, and an attention on a core takes longer with a mask or dropout.

The kernel of a core adds a mask to scores that it has, and has no dropout and no gradient of a mask: with dropout
autograd keeps all scores, and the backward of a mask that needs a gradient makes them again (``ops.biased_attention``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.compute.traffic import MovedTensor
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.hardware.functions import ElementTime, transposed
from autopar.cost_model.stacks.attention_rate import KEYS_OF_BLOCK, share_of_blocks
from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.attention import attention_arguments, is_attention, lengths_of
from autopar.ir.ops.biased_attention import TILE
from autopar.ir.precision import itemsize_of
from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import call_of

# Ops whose kernels read their first operand in the order of its dimensions and copy it where its memory has another, as
# after a permutation: once forward; and whether backward copies it again, as autograd keeps it as it was (seen by the
# profiler on CPUs in torch 2.13).
_READ_IN_ORDER = {"layer_norm": True, "softmax": False, "log_softmax": False}

# A core takes this many times as long for it, at the least, where elements are read with a stride: it uses one of each
# cache line. A profile has it by the stride (``transposed``).
_TRANSPOSED_ON_CPU = 2.0


@dataclass(frozen=True, slots=True)
class BesideMemory:
    """Of elements, rows or scores, seconds of each."""

    parts: tuple[tuple[MovedTensor, ElementTime], ...]

    def time(self, degrees: dict[str, int], num_microbatches: int) -> OpTime:
        """Seconds of one microbatch on a rank."""
        taken = [(own.local(degrees, num_microbatches), seconds) for own, seconds in self.parts]
        return OpTime(*(sum(count * seconds[way] for count, seconds in taken) for way in range(2)))

    @classmethod
    def of(
        cls,
        node: fx.Node,
        rule: FactorRule,
        device: Device,
        precision: str,
        batch_factor: str | None,
        differentiable: Collection[int],
        documents: Documents | None = None,
    ) -> BesideMemory | None:
        """Of an op; None of one that takes nothing else.

        differentiable: positions of operands that need a gradient. documents: of an attention that runs document by
        document, those of a row.
        """
        if op_name(node) in _READ_IN_ORDER and not device.stack.fuses:
            found = _in_order(node, rule, device, precision)
        elif is_attention(node) and device.is_cpu:
            found = _around_kernel(node, rule, device, precision, differentiable, documents)
        else:
            return None
        parts = []
        for count, factors, seconds in found:
            names = frozenset(f for dim in factors for f in dim)
            parts.append((MovedTensor(float(count), names, batch_factor in names), seconds))
        return cls(tuple(parts)) if parts else None


# How many elements, rows or scores there are of the whole batch, the factors that they run over, seconds of each.
_Part = tuple[float, TensorFactors, ElementTime]


def _in_order(node: fx.Node, rule: FactorRule, device: Device, precision: str) -> Iterator[_Part]:
    """Of a norm or a softmax."""
    name, value = op_name(node), tensor_operands(node)[0].meta["val"]
    if not value.is_contiguous():
        seconds = _copy_s(value, device, precision)
        yield value.numel(), rule.operands[0], ElementTime(seconds, seconds if _READ_IN_ORDER[name] else 0.0)
    row = device.function_time("normalised_row")
    if name == "layer_norm" and row.forward_s:
        width = prod(call_of(node).bound()["normalized_shape"])
        yield value.numel() // width, rule.operands[0], row


def _around_kernel(
    node: fx.Node,
    rule: FactorRule,
    device: Device,
    precision: str,
    differentiable: Collection[int],
    documents: Documents | None,
) -> Iterator[_Part]:
    """Of an attention on a core, whose kernel copies a mask that does not lie row by row."""
    operands, options = attention_arguments(node)
    mask, rows = operands[3], rule.operands[0][:-1]
    queries, keys = lengths_of(rule)
    of_a_head = queries * keys if documents is None else documents.scores
    scores = prod(operands[0].meta["val"].shape[:2]) * of_a_head
    if options["dropout_p"] > 0:
        yield scores, rows, device.function_time("dropped_score")
    elif mask is not None:
        position = tensor_operands(node).index(mask)
        added, causal = device.function_time("biased_score"), options["kind"] == "causal"
        seen, remade = (share_of_blocks(keys, size) if causal else 1.0 for size in (KEYS_OF_BLOCK, TILE))
        backward_s = remade * added.backward_s if position in differentiable else 0.0
        yield scores, rows, ElementTime(seen * added.forward_s, backward_s)
        if mask.meta["val"].stride(-1) > 1:
            seconds = _copy_s(mask.meta["val"], device, precision)
            yield mask.meta["val"].numel(), rule.operands[position], ElementTime(seconds, 0.0)


def _copy_s(value: torch.Tensor, device: Device, precision: str) -> float:
    """Seconds of an element that is copied in the order of its dimensions."""
    itemsize = itemsize_of(value.dtype, precision)
    in_order = device.memory_seconds(2.0 * itemsize)
    apart = value.stride(-1) * itemsize
    if not device.is_cpu or apart <= itemsize:
        return in_order
    return max(_TRANSPOSED_ON_CPU * in_order, device.function_time(transposed(apart)).forward_s)
