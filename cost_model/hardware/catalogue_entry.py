"""Entries of the catalogue: figures with their sources, and the device and links made of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from autopar.cost_model.hardware.device import GB, Device, Disk, Host, Link, MatmulRate
from autopar.cost_model.hardware.fitted_constants import FITTED, Fitted
from autopar.cost_model.hardware.matmul_efficiency import Tile, Tiling
from autopar.cost_model.stacks.attention_rate import AttentionKernel
from autopar.cost_model.stacks.known import AUTOPAR
from autopar.cost_model.stacks.stack import Architecture, Stack
from autopar.ir.errors import InvalidCluster


@dataclass(frozen=True, slots=True)
class Published:
    """A figure from a datasheet, a paper or a published measurement."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Assumed:
    """A figure that is assumed, and the reason."""

    value: float
    reason: str

    def by(self, _: Fitted) -> float:
        """The value, whatever was fitted."""
        return self.value


@dataclass(frozen=True, slots=True)
class Fit:
    """``scale`` times the constant called ``constant`` of ``fitted_constants``. reason: where the scale is from.

    watts: power limit of the device over that of the one that the scale was measured on.
    """

    constant: str
    reason: str
    scale: float = 1.0
    watts: float = 1.0

    @property
    def value(self) -> float:
        """The figure with the constants as fitted."""
        return self.by(FITTED)

    def by(self, fitted: Fitted) -> float:
        """The figure with other constants."""
        found: float = self.scale * getattr(fitted, self.constant) * self.watts**fitted.power
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEntry:
    """Matrix rate in one precision: TFLOP/s dense, fractions achieved by endless matmuls and by fused attention.

    attention: of the kernel of the software stack, what is left of its rates in a training step, if it is a ``Fit``;
    else the fraction of the peak, whatever the stack. None: attention is not computed in it.
    """

    peak_tflops: Published | Assumed
    efficiency: Assumed | Fit
    attention: Assumed | Fit | None

    def rate(self, precision: str, fitted: Fitted, kernel: AttentionKernel | None) -> MatmulRate:
        """In FLOP/s, with these fitted constants and this kernel of attention."""
        attention, sustained = 0.0 if self.attention is None else self.attention.by(fitted), 1.0
        if self.attention is None or isinstance(self.attention, Assumed):
            kernel = None
        elif kernel is None:
            raise InvalidCluster(
                f"the software stack has no attention kernel for {precision} on this device\n  try: a later --stack"
            )
        else:
            sustained = attention * (fitted.early_attention if kernel.early else 1.0)
            attention = sustained * kernel.typical
        return MatmulRate(
            precision=precision,
            peak_flops=self.peak_tflops.value * 1e12,
            efficiency=self.efficiency.by(fitted),
            attention_efficiency=attention,
            attention=kernel,
            sustained=sustained,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingEntry:
    """Tiles of the matmul library, the units that compute them, and the depth at half of the rate."""

    tiles: tuple[Tile, ...]
    why_tiles: str
    units: Published | Assumed
    half_depth: Assumed | Fit

    def tiling(self, fitted: Fitted) -> Tiling:
        """The tiling with these fitted constants."""
        return Tiling(tiles=self.tiles, units=int(self.units.value), half_depth=self.half_depth.by(fitted))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """A kind of link: GB/s (decimal) per device and direction, microseconds. trees: as of ``Link``."""

    name: str
    bandwidth_gb_s: Published | Assumed
    efficiency: Assumed
    base_latency_us: Assumed
    hop_latency_us: Assumed
    peer_gb_s: Published | None = None
    switch_reduce_gb_s: Published | None = None
    trees: bool = True

    def link(self) -> Link:
        """The link, in bytes and seconds."""
        return Link(
            name=self.name,
            bandwidth=self.bandwidth_gb_s.value * GB,
            efficiency=self.efficiency.value,
            base_latency_s=self.base_latency_us.value * 1e-6,
            hop_latency_s=self.hop_latency_us.value * 1e-6,
            peer_bandwidth=self.peer_gb_s.value * GB if self.peer_gb_s else None,
            switch_reduce=self.switch_reduce_gb_s.value * GB if self.switch_reduce_gb_s else None,
            trees=self.trees,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """One GPU's share of its host: GB/s (decimal) of the link in one direction and of memory, and GB of that."""

    link_gb_s: Published | Assumed
    link_efficiency: Assumed
    memory_gb_s: Published | Assumed
    memory_efficiency: Assumed
    memory_gb: Published | Assumed | None = None

    def host(self) -> Host:
        """The host, in bytes and seconds."""
        return Host(
            link_bandwidth=self.link_gb_s.value * GB,
            link_efficiency=self.link_efficiency.value,
            memory_bandwidth=self.memory_gb_s.value * GB,
            memory_efficiency=self.memory_efficiency.value,
            memory_bytes=inf if self.memory_gb is None else self.memory_gb.value * GB,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEntry:
    """One GPU's share of the local disks of its node: GB/s (decimal) and GB, and what files achieve of the former."""

    read_gb_s: Published | Assumed
    write_gb_s: Published | Assumed
    efficiency: Assumed
    capacity_gb: Published | Assumed

    def disk(self) -> Disk:
        """The disk, in bytes and seconds."""
        return Disk(
            read_bandwidth=self.read_gb_s.value * self.efficiency.value * GB,
            write_bandwidth=self.write_gb_s.value * self.efficiency.value * GB,
            capacity=self.capacity_gb.value * GB,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """One device type in its usual node. gpus_per_tray: what a job takes of a node that is a rack of trays; None if it
    takes whole nodes."""

    name: str
    rates: dict[str, RateEntry]
    memory_gb: Published | Assumed
    reserved_gb: Assumed
    bandwidth_gb_s: Published | Assumed
    memory_efficiency: Assumed | Fit
    kernel_launch_us: Assumed | Fit
    tiling: TilingEntry
    gpus_per_node: Published | Assumed
    intra_node: LinkEntry
    inter_node: LinkEntry
    host: HostEntry
    architecture: Architecture
    gpus_per_tray: Published | Assumed | None = None
    disk: DiskEntry | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is a core of the host."""
        return self.architecture == "cpu"

    def share_of_node(self, num_gpus: int) -> int:
        """GPUs that each node gives to a job of ``num_gpus``: all of them, or where those do not fill racks of trays,
        an equal number of whole trays, more than half of a rack, on the fewest racks. Raises InvalidCluster."""
        node = int(self.gpus_per_node.value)
        if num_gpus <= node or num_gpus % node == 0:
            return min(num_gpus, node)
        if self.gpus_per_tray is None:
            raise InvalidCluster(
                f"{num_gpus} GPUs do not fill nodes of {node}.\n"
                f"  try: --gpus {num_gpus // node * node}, or another --gpus-per-node"
            )
        tray = int(self.gpus_per_tray.value)
        for share in range(node // tray * tray, node // 2, -tray):
            if num_gpus % share == 0:
                return share
        unit = -(-num_gpus // node) * tray
        raise InvalidCluster(
            f"{num_gpus} GPUs do not fill racks of {node}, and are not as many whole trays of {tray} GPUs from each of "
            f"several racks.\n  try: --gpus {num_gpus // unit * unit}, or --gpus-per-node with what each rack gives"
        )

    def device(self, fitted: Fitted = FITTED, stack: Stack = AUTOPAR) -> Device:
        """The device with these fitted constants under a software stack, in bytes, FLOP/s and seconds."""
        kernel = stack.attention.get(self.architecture)
        return Device(
            name=self.name,
            matmul=tuple(rate.rate(precision, fitted, kernel) for precision, rate in self.rates.items()),
            memory_bytes=int(self.memory_gb.value * GB),
            reserved_bytes=int(self.reserved_gb.value * GB),
            memory_bandwidth=self.bandwidth_gb_s.value * GB,
            memory_efficiency=self.memory_efficiency.by(fitted),
            kernel_launch_s=self.kernel_launch_us.by(fitted) * 1e-6,
            tiling=self.tiling.tiling(fitted),
            host=self.host.host(),
            is_cpu=self.is_cpu,
            disk=None if self.disk is None else self.disk.disk(),
            stack=stack,
            hidden=fitted.hidden,
        )
