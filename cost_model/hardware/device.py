"""Devices and links.

Every published figure (a datasheet's peak, a capacity) is a field of its own beside the fraction of it that
training is assumed to achieve. ``catalogue`` holds the figures with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt

from autopar.cost_model.hardware.functions import ElementTime, FunctionName, Functions
from autopar.cost_model.hardware.matmul_efficiency import Tiling
from autopar.cost_model.stacks.attention_rate import AttentionKernel, by_logarithm, share_of_blocks
from autopar.cost_model.stacks.known import AUTOPAR
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.errors import InvalidCluster
from autopar.ir.offload import Offload
from autopar.ir.redistribution import Collective

GIB = 1 << 30
MIB = 1 << 20
GB = 1e9

# Seconds of work after which a device's ``jitter_s`` is stated.
JITTER_AFTER_S = 1e-3

# Bytes of one floating point number in compute.
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}

# Collectives that FSDP issues, and what they are as fast as if nothing else is known.
_ALIKE = {"zero_gather": "all_gather", "zero_scatter": "reduce_scatter"}

# What a precision is costed as where a device lacks it.
_SIXTEEN_BIT = {"bf16": "fp16", "fp16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """Dense matrix multiplication in one precision.

    peak_flops: datasheet FLOP/s without sparsity. efficiency: fraction that an endless matmul inside a training
    step achieves. attention_efficiency: what fused attention does. attention_by_length: (keys, what it does
    of so many), the shortest first, where that is known. block_of_keys: of a kernel that computes whole blocks of keys
    under a causal mask, of which those figures then are; None if masks make no difference. attention: the kernel that
    computes it, of whose rates ``sustained`` is left in a training step; None where one figure, or one by length, is
    all that is known.
    """

    precision: str
    peak_flops: float
    efficiency: float
    attention_efficiency: float
    attention_by_length: tuple[tuple[int, float], ...] = ()
    block_of_keys: int | None = None
    attention: AttentionKernel | None = None
    sustained: float = 1.0

    def attention_at(self, length: float) -> float:
        """The one figure of attention to ``length`` keys, between known lengths by their logarithm."""
        return by_logarithm(self.attention_by_length, length) if self.attention_by_length else self.attention_efficiency

    def attention_rates(
        self, length: float, head: float, *, causal: bool, window: float | None = None
    ) -> tuple[float, float]:
        """Fractions of the peak, forward and backward, of attention to ``length`` keys by heads of a size. window: the
        last keys that a query sees, if not all."""
        if self.attention is None:
            rate = self.attention_at(length)
            if self.block_of_keys is not None and not causal:
                # Under a causal mask half of the scores count.
                rate = min(1.0, 2 * share_of_blocks(length, self.block_of_keys) * rate)
            return rate, rate
        forward, backward = self.attention.fractions(head, length, causal=causal, window=window)
        return self.sustained * forward, self.sustained * backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One device's share of its node's CPUs, for what is offloaded.

    link_bandwidth: bytes/s between host and device memory in one direction. memory_bandwidth: bytes/s of host memory.
    Both as specified, with the fractions achieved. memory_bytes: host memory for what is offloaded, infinite if nobody
    says.
    """

    link_bandwidth: float
    link_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    memory_bytes: float = inf

    def copy_seconds(self, num_bytes: float) -> float:
        """Seconds to copy ``num_bytes`` to the device or back."""
        return num_bytes / (self.link_bandwidth * self.link_efficiency)

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds to move ``num_bytes`` to or from host memory."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One device's share of its node's local disks, for what fits nowhere else.

    read_bandwidth, write_bandwidth: bytes/s that large pieces achieve while nothing else is moved; what is read and
    what is written share the disk. capacity: bytes.
    """

    read_bandwidth: float
    write_bandwidth: float
    capacity: float

    def seconds(self, read: float, written: float) -> float:
        """Seconds to read and to write so many bytes."""
        return read / self.read_bandwidth + written / self.write_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one CPU rank).

    memory_bytes: capacity. reserved_bytes: what the driver, communication buffers and library workspaces take
    of it. memory_bandwidth: bytes/s by the datasheet, of which kernels achieve ``memory_efficiency``.
    bandwidth_by_size: (bytes that a kernel moves, bytes/s that it achieves), the fewest first, where that was
    measured: the caches of a core hold what a kernel of few bytes reads. kernel_launch_s: floor of the time of one
    kernel. tiling: what makes matmuls that are not endless slower.
    is_cpu: whether it is a core of the host. Nothing runs beside its compute; what a matrix product reads and writes
    adds to its time and does not hide behind it; experts are computed one after the other; and all-gathers and
    reduce-scatters of a model are all-to-alls, as in ``ir.primitives.group_communication``.
    functions: of an element, exponentials and the like, where they take longer than reading and writing it.
    optimizer_bandwidth: bytes/s that a fused optimiser step achieves; None if as other kernels.
    jitter_s: by which the slowest rank is later than the others when they meet after a millisecond of equal work. Noise
    adds up at random, so after t milliseconds it is sqrt(t) times as much (``straggler_delay_s``). disk: None if it has
    none. stack: the software that runs on it. hidden: share of the collectives that it overlaps with products which
    takes no time.
    """

    name: str
    matmul: tuple[MatmulRate, ...]
    memory_bytes: int
    reserved_bytes: int
    memory_bandwidth: float
    memory_efficiency: float
    kernel_launch_s: float
    tiling: Tiling
    host: Host
    is_cpu: bool = False
    functions: Functions = ()
    optimizer_bandwidth: float | None = None
    bandwidth_by_size: tuple[tuple[float, float], ...] = ()
    jitter_s: float = 0.0
    disk: Disk | None = None
    stack: Stack = AUTOPAR
    hidden: float = 0.0

    def is_left_by(self, offload: Offload) -> bool:
        """Whether what is offloaded takes none of the device's memory. A CPU is its own host."""
        return offload >= (Offload.DISK if self.is_cpu else Offload.HOST)

    def exposed(self, collective: Collective) -> float:
        """Share of the time of a collective of activations over tensor-parallel ranks that nothing hides."""
        return 1.0 - self.hidden if collective in self.stack.overlaps else 1.0

    def straggler_delay_s(self, work_s: float, num_meetings: float) -> float:
        """Seconds that ranks wait for the slowest, in ``work_s`` seconds between which they meet so often."""
        return self.jitter_s * sqrt(max(0.0, work_s * num_meetings) / JITTER_AFTER_S)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions with a matrix rate of their own."""
        return tuple(rate.precision for rate in self.matmul)

    def matmul_rate(self, precision: str) -> MatmulRate:
        """Rate in ``precision``. bf16 on a device that has only fp16 units is costed at the fp16 rate.

        Raises InvalidCluster for a precision the device has no figure for.
        """
        for name in (precision, _SIXTEEN_BIT.get(precision)):
            for rate in self.matmul:
                if rate.precision == name:
                    return rate
        raise InvalidCluster(f"{self.name} has no {precision} rate; it has {', '.join(self.precisions)}")

    def peak_flops(self, precision: str) -> float:
        """Datasheet FLOP/s, the denominator of model FLOPs utilisation."""
        return self.matmul_rate(precision).peak_flops

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds to move ``num_bytes`` to or from device memory."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)

    def kernel_seconds(self, num_bytes: float) -> float:
        """Seconds in which one kernel reads and writes ``num_bytes`` of device memory."""
        if self.bandwidth_by_size:
            return num_bytes / by_logarithm(self.bandwidth_by_size, num_bytes)
        return self.memory_seconds(num_bytes)

    def function_time(self, name: FunctionName) -> ElementTime:
        """Seconds of an element of which a kernel takes a function; 0 where its memory takes longer."""
        return next((own for known, own in self.functions if known == name), ElementTime())

    def optimizer_seconds(self, num_bytes: float) -> float:
        """Seconds in which a fused optimiser step reads and writes ``num_bytes`` of device memory."""
        return num_bytes / (self.optimizer_bandwidth or self.memory_bandwidth * self.memory_efficiency)

    @property
    def grouped(self) -> float:
        """Rate of the products of experts, of that of one product as large. On a core each is a product of its own."""
        return 1.0 if self.is_cpu else self.stack.grouped

    @property
    def may_keep_on_host(self) -> bool:
        """Whether activations may wait in host memory, which is other memory than that of the device."""
        return self.stack.keeps_on_host and not self.is_cpu

    @property
    def usable_bytes(self) -> int:
        """Memory left for a training program."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between the devices of a node, or between nodes.

    bandwidth: bytes/s of one device in one direction, by the datasheet. efficiency: fraction of it that a ring
    of devices achieves. base_latency_s: cost of starting a collective. hop_latency_s: of each step of a ring.
    peer_bandwidth: bytes/s between one pair of devices where a pair gets less than ``bandwidth`` (links without
    a switch), else None.
    switch_reduce: all-reduce bytes/s of a switch that reduces in the network (NVLink SHARP), used by groups of
    at least five devices; None without. relative_time: kind -> seconds a byte, of those of a ring all-reduce; kinds
    that are not named take as long. trees: whether an all-reduce between nodes goes up and down a tree of them, so that
    its latency grows with their logarithm; else it goes round a ring of all devices. alone: achieved bytes/s of one
    device while no other of its node uses the link;
    None if that is as with all of them. overlap: share of an all-reduce that can run beside compute; the rest needs the
    device itself, as where its cores copy what is sent.
    """

    name: str
    bandwidth: float
    efficiency: float
    base_latency_s: float
    hop_latency_s: float
    peer_bandwidth: float | None = None
    switch_reduce: float | None = None
    relative_time: tuple[tuple[str, float], ...] = ()
    trees: bool = True
    alone: float | None = None
    overlap: float = 1.0

    def among(self, num_senders: int, per_node: int) -> Link:
        """The link while ``num_senders`` of the ``per_node`` devices of a node use it, as all of them do otherwise."""
        if self.alone is None or num_senders >= per_node:
            return self
        share = self.bandwidth * per_node / num_senders
        return replace(self, bandwidth=max(self.bandwidth, min(self.alone / self.efficiency, share)))

    def slower(self, factor: float) -> Link:
        """The link with that fraction of its bandwidth."""
        return self if factor == 1.0 else replace(self, bandwidth=self.bandwidth / factor)

    def relative(self, kind: str) -> float:
        """Seconds a byte of a collective, or of a "send", of those of a ring all-reduce."""
        known = dict(self.relative_time)
        return known.get(kind, known.get(_ALIKE.get(kind, kind), 1.0))

    def ring_bandwidth(self, size: int) -> float:
        """Achieved bytes/s per device in a group of ``size`` devices."""
        if self.peer_bandwidth is not None:
            return min(self.bandwidth, self.peer_bandwidth * max(1, size - 1)) * self.efficiency
        return self.bandwidth * self.efficiency
