"""A software stack: what the training program of a year and a vendor runs, as far as it changes what a step takes.

Every figure is of a kernel or a library, with its source; none is of a training run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.cost_model.stacks.attention_rate import AttentionKernel

# Generations of devices that kernels are written for.
Architecture = Literal["volta", "ampere", "hopper", "blackwell", "cdna", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack.

    attention: the fused kernel that it runs in 16 bits on devices of an architecture; of those that are not named, the
    catalogue has one rate. why: where the choice of kernels is from.
    """

    name: str
    attention: Mapping[Architecture, AttentionKernel]
    why: str
