"""A software stack: what the training program of a year and a vendor runs, as far as it changes what a step takes.

Every figure is of a kernel or a library, with its source; none is of a training run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.cost_model.stacks.attention_rate import AttentionKernel
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.redistribution import Collective

# Generations of devices that kernels are written for.
Architecture = Literal["volta", "ampere", "hopper", "blackwell", "cdna", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack.

    attention: the fused kernel that it runs in 16 bits on devices of an architecture; of those that are not named, the
    catalogue has one rate. grouped: rate of the products of experts, of that of one product as large.
    casts_once: whether operands of products in 8-bit floats are cast once for all of their products. local_scales:
    whether their scales are a rank's own, or from steps before, so that no product waits for a collective.
    fuses: whether pointwise ops that follow each other are one kernel; reductions: names of the ops that may be in it
    too. merges: whether products of one tensor with several weights are one. extra_bytes: of ops that are several
    kernels, or read twice: bytes an element of the first operand, forward and backward, beyond each tensor once.
    overlaps: collectives of activations over tensor-parallel ranks that run, in pieces, beside the product before or
    after them. why: where all this is from.
    """

    name: str
    attention: Mapping[Architecture, AttentionKernel] = field(hash=False)
    memory: StackMemory
    why: str
    fuses: bool = False
    merges: bool = False
    reductions: frozenset[str] = frozenset()
    extra_bytes: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    grouped: float = 1.0
    casts_once: bool = False
    local_scales: bool = False
    overlaps: frozenset[Collective] = frozenset()
