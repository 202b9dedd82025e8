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
from autopar.ir.schedule import SCHEDULES, Schedule

# Bytes an element that biases of experts move in torch, row by row: of a row's bias, written (2), the sum (2 + 2 + 2);
# backward what comes in, read to be sorted and summed by expert (counted, not measured).
_ROW_BY_ROW = (8.0, 4.0)

GatheredNarrow = Literal["weights", "activations"]
# Generations of devices that kernels are written for.
Architecture = Literal["volta", "ampere", "hopper", "blackwell", "blackwell-ultra", "cdna", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack.

    attention: the fused kernel that it runs in 16 bits on devices of an architecture; of those that are not named, the
    catalogue has one rate. grouped: rate of the products of experts, of that of one product as large.
    casts_once: whether operands of products in 8-bit floats are cast once for all of their products, forward and
    backward. fuses_casts: whether a compiler makes kernels of casts and the ops before them. local_scales: whether
    scales of 8-bit products are a rank's own, or from steps before, so that no product waits for a collective.
    gathers_narrow: what is gathered in 8 bits where products by one scale read nothing else of it: weights under ZeRO,
    activations and gradients of tensor-parallel layers.
    fuses: whether pointwise ops that follow each other are one kernel; reductions: names of the ops that may be in it
    too. merges: whether products of one tensor with several weights are one. extra_bytes: of ops that are several
    kernels, or read twice: bytes an element of the first operand, forward and backward, beyond each tensor once;
    rotation_bytes: likewise of rotated queries and keys, beyond a kernel that reads and writes them.
    overlaps: collectives of activations over tensor-parallel ranks that run, in pieces, beside the product before or
    after them. expert_biases: bytes that adding the biases of experts moves for an element of the results of the
    product on the way in, forward and backward, and of that on the way out. sends_once: whether a token that goes to
    several experts of a node travels there once and is copied inside it. expert_by_expert: whether each expert has
    kernels of its own for its products and casts; launches_of_bias: those for its bias on the way out, forward and
    backward. adds_in_products: whether the product that makes a gradient of weights adds it to those of earlier
    microbatches, in float32. gathers_ahead: whether the parameters of a rank's next stage are gathered (once a step)
    while it computes the stage before, for all microbatches that come first there. hides_dispatch: whether tokens of
    one microbatch travel to experts and back while another microbatch is computed. two_queues: where the pairs of
    DualPipeV run at once (``autopar.ir.pairs``). schedules: of pipelines, that a free search may choose; any_order:
    whether a pipeline runs its passes in any order that a plan has, and not in those of named schedules alone.
    keeps_any: whether a block keeps any tensors for its backward, and not those of a level alone; keeps_on_host:
    whether some of them may wait in host memory. why: where all this is from.
    """

    name: str
    attention: Mapping[Architecture, AttentionKernel] = field(hash=False)
    memory: StackMemory
    why: str
    fuses: bool = False
    merges: bool = False
    reductions: frozenset[str] = frozenset()
    extra_bytes: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    rotation_bytes: tuple[float, float] = (0.0, 0.0)
    grouped: float = 1.0
    casts_once: bool = False
    fuses_casts: bool = False
    local_scales: bool = False
    gathers_narrow: frozenset[GatheredNarrow] = frozenset()
    overlaps: frozenset[Collective] = frozenset()
    expert_biases: tuple[tuple[float, float], tuple[float, float]] = (_ROW_BY_ROW, _ROW_BY_ROW)
    sends_once: bool = False
    expert_by_expert: bool = False
    launches_of_bias: tuple[int, int] = (0, 0)
    adds_in_products: bool = False
    gathers_ahead: bool = False
    schedules: tuple[Schedule, ...] = SCHEDULES
    any_order: bool = False
    keeps_any: bool = False
    keeps_on_host: bool = False
    hides_dispatch: bool = False
    two_queues: Literal["cpu", "none"] = "none"

    @property
    def shares_casts(self) -> bool:
        """Whether products of one tensor share its cast to 8-bit floats."""
        return self.casts_once or self.fuses_casts
