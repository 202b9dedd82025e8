"""What was measured, before anything is fitted to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from autopar.cost_model.cluster import Group
from autopar.cost_model.description import Kind

# Kinds of communication that are measured: four collectives, and a send between neighbours.
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of rows x depth with depth x columns."""

    precision: str
    rows: int
    columns: int
    depth: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Causal attention, forward and backward. flops: of the half of the scores that is needed."""

    precision: str
    flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """An elementwise op on large tensors: bytes read and written."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Communicated:
    """One collective, or one send, while all groups alike do the same. payload_bytes: as in ``collectives.py``."""

    kind: str
    group: Group
    payload_bytes: int
    seconds: float


@dataclass(slots=True)
class Samples:
    """Times are those of the slowest rank, while all ranks measure the same."""

    products: list[Product] = field(default_factory=list)
    attention: list[AttentionRun] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    communicated: list[Communicated] = field(default_factory=list)
    launch_s: float = 0.0
