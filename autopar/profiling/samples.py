"""Measurements, before anything is fitted to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import TypeVar, get_args

from autopar.cost_model.cluster_file import Kind
from autopar.cost_model.hardware.cluster import Group
from autopar.cost_model.hardware.device import ITEMSIZE
from autopar.cost_model.hardware.functions import ElementTime, FunctionName
from autopar.ir.redistribution import Collective

# Kinds of communication that are measured: four collectives, a send between neighbours, and what FSDP issues.
KINDS: tuple[Kind, ...] = get_args(Kind)
COLLECTIVES = {kind.value: kind for kind in Collective if kind.communicates} | {
    "zero_gather": Collective.ALL_GATHER,
    "zero_scatter": Collective.REDUCE_SCATTER,
}


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
        """Floating point operations of the matrix product."""
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def num_bytes(self) -> float:
        """Bytes of both operands and the result."""
        elements = self.rows * self.depth + self.depth * self.columns + self.rows * self.columns
        return float(ITEMSIZE[self.precision] * elements)


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Causal attention, forward and backward. flops: of the half of the scores that is needed. length: keys."""

    precision: str
    flops: float
    seconds: float
    length: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Products of elements, layer norms or an optimiser step: bytes read and written by all kernels together."""

    num_bytes: int
    seconds: float
    num_kernels: int = 1

    @property
    def kernel_bytes(self) -> float:
        """Bytes that one of the kernels reads and writes."""
        return self.num_bytes / self.num_kernels

    def bytes_per_s(self, launch_s: float) -> float:
        """What the kernels achieve in the time that is not their launches, which is a tenth of all at least."""
        return self.num_bytes / max(self.seconds - self.num_kernels * launch_s, self.seconds / 10)


@dataclass(frozen=True, slots=True)
class Communicated:
    """One collective, or one send, while all groups alike do the same. payload_bytes: as in ``collectives.py``.

    alone: of sends, whether one rank of each node sends and the others wait.
    """

    kind: str
    group: Group
    payload_bytes: int
    seconds: float
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Overlapped:
    """An all-reduce over ``group``, compute, and both at once: seconds."""

    group: Group
    communication_s: float
    compute_s: float
    both_s: float


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds that a small all-reduce over ``group`` adds to ``compute_s`` before it: alone, and what ranks wait."""

    group: Group
    compute_s: float
    added_s: float
    alone_s: float


@dataclass(slots=True)
class Samples:
    """Times are those of the slowest rank, while all ranks measure the same."""

    products: list[Product] = field(default_factory=list)
    attention: list[AttentionRun] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    optimizer: list[Traffic] = field(default_factory=list)
    communicated: list[Communicated] = field(default_factory=list)
    overlapped: list[Overlapped] = field(default_factory=list)
    waited: list[Waited] = field(default_factory=list)
    launch_s: float = 0.0
    functions: dict[FunctionName, ElementTime] = field(default_factory=dict)

    @classmethod
    def typical(cls, passes: list[Samples]) -> Samples:
        """The median time of each thing: what else a machine does lasts longer than a measurement, but seldom through
        most of them. Overlaps and waits of every pass."""
        return cls(
            products=_medians(one.products for one in passes),
            attention=_medians(one.attention for one in passes),
            traffic=_medians(one.traffic for one in passes),
            optimizer=_medians(one.optimizer for one in passes),
            communicated=_medians(one.communicated for one in passes),
            overlapped=[one for samples in passes for one in samples.overlapped],
            waited=[one for samples in passes for one in samples.waited],
            launch_s=median(one.launch_s for one in passes),
            functions={
                name: ElementTime(*map(median, zip(*(one.functions[name] for one in passes), strict=True)))
                for name in passes[0].functions
            },
        )


_Timed = TypeVar("_Timed", Product, AttentionRun, Traffic, Communicated)


def _medians(passes: Iterable[list[_Timed]]) -> list[_Timed]:
    """Of what is alike the first of each pass is compared with the firsts, the second with the seconds, and so on."""
    found: dict[tuple[_Timed, int], list[float]] = {}
    for samples in passes:
        times: Counter[_Timed] = Counter()
        for one in samples:
            alike = replace(one, seconds=0.0)
            times[alike] += 1
            found.setdefault((alike, times[alike]), []).append(one.seconds)
    return [replace(alike, seconds=median_low(seconds)) for (alike, _), seconds in found.items()]
