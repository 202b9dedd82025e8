"""Cluster files: a catalogued GPU, with any figure replaced by a measured one.

gpu: a100-80gb
num_gpus: 64
gpus_per_node: 8
memory_gb: 80
host_gb_s: 24.8
inter_node: {bandwidth_gb_s: 12.5, efficiency: 0.85, latency_us: 8}

Fewer NICs than GPUs, switches that pass on less than NICs send, and nodes of several kinds:

nodes: [{gpu: a100-80gb, num_nodes: 16}, {gpu: h100-sxm, num_nodes: 16}]
gpus_per_node: 8
nics: {per_node: 4, bandwidth_gb_s: 25}
pods: {num_nodes: 16, oversubscription: 4}

Host memory and local disks, one GPU's share of each, for what does not fit on the devices:

host_memory_gb: 250
disk: {read_gb_s: 5.6, write_gb_s: 3.0, capacity_gb: 3840}

Failures, storage for checkpoints and nodes in reserve, of which goodput is predicted:

failures: {gpu_hours: 80000, node_hours: 50000, repair_hours: 24, restart_s: 90}
storage_gb_s: 200
spares: 2

Plans share work evenly, so ranks wait for the slowest kind of node: a cluster of several kinds is planned as one whose
devices have the least of every figure. Rail switches, which join the NICs of equal number of many nodes, make one pod
of those nodes: what goes to another NIC takes the links inside a node first.

``autopar profile`` measures a machine and writes such a file with every figure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autopar.cost_model.catalogue import find_gpu, make_cluster
from autopar.cost_model.hardware.cluster import Cluster, Pods
from autopar.cost_model.hardware.device import GB, MIB, Disk, Link, MatmulRate
from autopar.cost_model.hardware.failure_rates import Reliability
from autopar.cost_model.hardware.functions import ElementTime, FunctionName, by_gelu
from autopar.cost_model.hardware.slowest_node import slowest_of
from autopar.cost_model.stacks.attention_rate import KEYS_OF_BLOCK
from autopar.cost_model.stacks.known import AUTOPAR, find_stack
from autopar.ir.bounded_text import bad_fields, parse_yaml
from autopar.ir.errors import InvalidCluster
from autopar.ir.ops.scalings import RATES

Fraction = Annotated[float, Field(gt=0, le=1)]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "zero_gather", "zero_scatter"]
PrecisionName = Literal["fp32", "bf16", "fp16", "fp8", "fp8-block", "mxfp8", "nvfp4"]

# Infinite where it never happens.
HoursOrNever = Annotated[float, Field(gt=0, allow_inf_nan=True)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LinkDescription(_Model):
    """Figures of a link that replace the catalogue's.

    bandwidth_gb_s: per GPU and direction, decimal. base_latency_us: of a collective; latency_us: of each step of a
    ring. relative_time: kind of collective -> seconds a byte, of those of an all-reduce; FSDP's are zero_gather and
    zero_scatter. trees: whether an all-reduce between nodes goes up and down a tree of them; else round a ring of all
    GPUs, as over Amazon's EFA. alone_gb_s: of one GPU, achieved while no other of its node uses the link. overlap:
    share of an all-reduce that can run beside compute.
    """

    bandwidth_gb_s: PositiveFloat | None = None
    efficiency: Fraction | None = None
    base_latency_us: Annotated[float, Field(ge=0)] | None = None
    latency_us: Annotated[float, Field(ge=0)] | None = None
    relative_time: dict[Kind, PositiveFloat] = {}
    trees: bool | None = None
    alone_gb_s: PositiveFloat | None = None
    overlap: Annotated[float, Field(ge=0, le=1)] | None = None

    def applied_to(self, link: Link) -> Link:
        """``link`` with the stated figures in place of its own."""
        if self.bandwidth_gb_s is not None:
            # What the catalogue knows of pairs and switches belongs to the link that is replaced.
            link = replace(link, bandwidth=self.bandwidth_gb_s * GB, peer_bandwidth=None, switch_reduce=None)
        if self.efficiency is not None:
            link = replace(link, efficiency=self.efficiency)
        if self.base_latency_us is not None:
            link = replace(link, base_latency_s=self.base_latency_us * 1e-6)
        if self.latency_us is not None:
            link = replace(link, hop_latency_s=self.latency_us * 1e-6)
        if self.relative_time:
            link = replace(link, relative_time=tuple(self.relative_time.items()))
        if self.trees is not None:
            link = replace(link, trees=self.trees)
        if self.alone_gb_s is not None:
            link = replace(link, alone=self.alone_gb_s * GB)
        if self.overlap is not None:
            link = replace(link, overlap=self.overlap)
        return link


class RateDescription(_Model):
    """Matrix rate in one precision: TFLOP/s, and the fractions of it that matmuls and fused attention achieve.

    attention_efficiency: not of narrower floats, in which there is no attention. attention_by_length: number of keys ->
    fraction that attention to so many achieves, at 64 elements a head; on a CPU, under a causal mask.
    """

    peak_tflops: PositiveFloat
    efficiency: Fraction
    attention_efficiency: Fraction | None = None
    attention_by_length: dict[PositiveInt, Fraction] = {}

    def rate(self, precision: str, *, is_cpu: bool) -> MatmulRate:
        """The matrix rate in this precision, in FLOP/s."""
        return MatmulRate(
            precision=precision,
            peak_flops=self.peak_tflops * 1e12,
            efficiency=self.efficiency,
            attention_efficiency=self.attention_efficiency or 0.0,
            attention_by_length=tuple(sorted(self.attention_by_length.items())),
            block_of_keys=KEYS_OF_BLOCK if is_cpu and self.attention_by_length else None,
        )


class NodesDescription(_Model):
    """Nodes of one kind."""

    gpu: str
    num_nodes: PositiveInt


class NicsDescription(_Model):
    """Network cards of a node, and GB/s of each in one direction."""

    per_node: PositiveInt
    bandwidth_gb_s: PositiveFloat


class PodsDescription(_Model):
    """See ``cluster.Pods``."""

    num_nodes: PositiveInt
    oversubscription: Annotated[float, Field(ge=1)]


class DiskDescription(_Model):
    """One GPU's share of the local disks of its node, for what fits nowhere else: GB/s that large files achieve, GB."""

    read_gb_s: PositiveFloat
    write_gb_s: PositiveFloat
    capacity_gb: PositiveFloat

    def disk(self) -> Disk:
        """In bytes and seconds."""
        return Disk(
            read_bandwidth=self.read_gb_s * GB, write_bandwidth=self.write_gb_s * GB, capacity=self.capacity_gb * GB
        )


class FailuresDescription(_Model):
    """Figures of failures that replace those that were observed (``failure_rates``).

    process_hours, gpu_hours, node_hours, network_hours: mean hours between failures of the software of one rank, of one
    GPU, of one host, and of the network of one node. repair_hours: until a lost node serves again. detect_s: from a
    failure until all ranks have ended; restart_s: until they are there again; save_s: by which a checkpoint delays
    training, besides its copy to host memory; replan_s: to find a plan for fewer ranks.
    """

    process_hours: HoursOrNever | None = None
    gpu_hours: HoursOrNever | None = None
    node_hours: HoursOrNever | None = None
    network_hours: HoursOrNever | None = None
    repair_hours: NonNegativeFloat | None = None
    detect_s: NonNegativeFloat | None = None
    restart_s: NonNegativeFloat | None = None
    save_s: NonNegativeFloat | None = None
    replan_s: NonNegativeFloat | None = None

    def applied_to(self, known: Reliability) -> Reliability:
        """``known`` with the stated figures in place of its own."""
        for kind, hours in (
            ("process", self.process_hours),
            ("gpu", self.gpu_hours),
            ("host", self.node_hours),
            ("network", self.network_hours),
        ):
            if hours is not None:
                known = known.with_mean_hours(kind, hours)
        return replace(
            known,
            repair_hours=known.repair_hours if self.repair_hours is None else self.repair_hours,
            detection_s=known.detection_s if self.detect_s is None else self.detect_s,
            restart_s=known.restart_s if self.restart_s is None else self.restart_s,
            save_s=known.save_s if self.save_s is None else self.save_s,
            replan_s=known.replan_s if self.replan_s is None else self.replan_s,
        )


class ClusterDescription(_Model):
    """A cluster file. What it does not say is the catalogue's entry for ``gpu``, or for those of ``nodes``.

    rates: by precision. half_depth: depth of a matrix product at half of its rate. memory_bandwidth_gb_s: achieved by
    large elementwise kernels; bandwidth_by_mib: MiB that a kernel reads and writes -> GB/s that it achieves, where they
    are not the same for all. launch_us: floor of the time of a kernel. functions_ns: of an element, an exponential or
    the like, or a copy in another order, or of a row of a layer norm, forward and backward; transcendental_ns: of a
    GELU by tanh, of which the others take a share. stack: the software whose kernels count where no figure is measured.
    optimizer_gb_s: achieved by a fused AdamW. jitter_us: by which the slowest of the ranks is late after a millisecond
    of equal work; it grows with the root of the time. host_gb_s: achieved between host and device; host_memory_gb: of
    one GPU's share, for what is offloaded. storage_gb_s: of checkpoints that all ranks write or read together. spares:
    nodes in reserve beyond those of ``num_gpus``; without it as many are taken as are worth it.
    """

    gpu: str | None = None
    num_gpus: PositiveInt | None = None
    nodes: list[NodesDescription] = []
    gpus_per_node: PositiveInt | None = None
    stack: str = AUTOPAR.name
    nics: NicsDescription | None = None
    pods: PodsDescription | None = None
    memory_gb: PositiveFloat | None = None
    matmul_efficiency: Fraction | None = None
    rates: dict[PrecisionName, RateDescription] = {}
    half_depth: PositiveFloat | None = None
    memory_bandwidth_gb_s: PositiveFloat | None = None
    bandwidth_by_mib: dict[PositiveFloat, PositiveFloat] = {}
    launch_us: Annotated[float, Field(ge=0)] | None = None
    functions_ns: dict[FunctionName, tuple[NonNegativeFloat, NonNegativeFloat]] = {}
    transcendental_ns: NonNegativeFloat | None = None
    optimizer_gb_s: PositiveFloat | None = None
    jitter_us: Annotated[float, Field(ge=0)] | None = None
    host_gb_s: PositiveFloat | None = None
    host_memory_gb: PositiveFloat | None = None
    disk: DiskDescription | None = None
    failures: FailuresDescription = FailuresDescription()
    storage_gb_s: PositiveFloat | None = None
    spares: NonNegativeInt | None = None
    intra_node: LinkDescription = LinkDescription()
    inter_node: LinkDescription = LinkDescription()

    @pydantic.model_validator(mode="after")
    def _one_way_to_say_which(self) -> ClusterDescription:
        if self.nodes and (self.gpu is not None or self.num_gpus is not None):
            raise ValueError("nodes say which GPUs there are; leave gpu and num_gpus out")
        if not self.nodes and (self.gpu is None or self.num_gpus is None):
            raise ValueError("expected gpu and num_gpus, or nodes")
        return self

    @pydantic.model_validator(mode="after")
    def _attention_where_there_is_some(self) -> ClusterDescription:
        for precision, rate in self.rates.items():
            if (rate.attention_efficiency is None) != (precision in RATES):
                said = (
                    "no attention_efficiency, as attention is not in it"
                    if precision in RATES
                    else "attention_efficiency"
                )
                raise ValueError(f"rates.{precision}: expected {said}")
        return self

    def _catalogued(self) -> Cluster:
        stack = find_stack(self.stack)
        if self.gpu is not None and self.num_gpus is not None:
            return make_cluster(self.gpu, self.num_gpus, self.gpus_per_node, stack=stack)
        counts = {self.gpus_per_node or int(find_gpu(kind.gpu).gpus_per_node.value) for kind in self.nodes}
        if len(counts) > 1:
            raise InvalidCluster(
                f"nodes of {' and '.join(map(str, sorted(counts)))} GPUs; expected as many on each\n"
                "  try: gpus_per_node, the fewest that a node has"
            )
        (count,) = counts
        known = [make_cluster(kind.gpu, kind.num_nodes * count, count, stack=stack) for kind in self.nodes]
        return slowest_of(known, sum(kind.num_nodes for kind in self.nodes))

    def cluster(self) -> Cluster:
        """The catalogued cluster with the stated figures in place of its own."""
        base = self._catalogued()
        device = base.device
        if self.memory_gb is not None:
            device = replace(device, memory_bytes=int(self.memory_gb * GB))
        if self.matmul_efficiency is not None:
            device = replace(device, matmul=tuple(replace(r, efficiency=self.matmul_efficiency) for r in device.matmul))
        if self.rates:
            known = {rate.precision: rate for rate in device.matmul}
            known |= {
                precision: described.rate(precision, is_cpu=device.is_cpu)
                for precision, described in self.rates.items()
            }
            device = replace(device, matmul=tuple(known.values()))
        if self.half_depth is not None:
            device = replace(device, tiling=replace(device.tiling, half_depth=self.half_depth))
        if self.memory_bandwidth_gb_s is not None:
            device = replace(device, memory_bandwidth=self.memory_bandwidth_gb_s * GB, memory_efficiency=1.0)
        if self.bandwidth_by_mib:
            by_size = tuple((MIB * size, GB * rate) for size, rate in sorted(self.bandwidth_by_mib.items()))
            device = replace(device, bandwidth_by_size=by_size)
        if self.launch_us is not None:
            device = replace(device, kernel_launch_s=self.launch_us * 1e-6)
        if self.transcendental_ns is not None:
            device = replace(device, functions=by_gelu(self.transcendental_ns * 1e-9))
        if self.functions_ns:
            measured = {name: ElementTime(*(1e-9 * ns for ns in own)) for name, own in self.functions_ns.items()}
            device = replace(device, functions=tuple((dict(device.functions) | measured).items()))
        if self.optimizer_gb_s is not None:
            device = replace(device, optimizer_bandwidth=self.optimizer_gb_s * GB)
        if self.jitter_us is not None:
            device = replace(device, jitter_s=self.jitter_us * 1e-6)
        if self.host_gb_s is not None:
            host = replace(device.host, link_bandwidth=self.host_gb_s * GB, link_efficiency=1.0)
            device = replace(device, host=host)
        if self.host_memory_gb is not None:
            device = replace(device, host=replace(device.host, memory_bytes=self.host_memory_gb * GB))
        if self.disk is not None:
            device = replace(device, disk=self.disk.disk())
        inter_node = base.inter_node
        if self.nics is not None:
            each = self.nics.bandwidth_gb_s * GB
            shared = min(each, each * self.nics.per_node / base.gpus_per_node)
            inter_node = replace(inter_node, bandwidth=shared, alone=each * inter_node.efficiency)
        pods = None if self.pods is None else Pods(**self.pods.model_dump())
        return replace(
            base,
            device=device,
            intra_node=self.intra_node.applied_to(base.intra_node),
            inter_node=self.inter_node.applied_to(inter_node),
            pods=pods,
            reliability=self.failures.applied_to(base.reliability),
            storage=None if self.storage_gb_s is None else self.storage_gb_s * GB,
            spare_nodes=self.spares,
        )


def cluster_from_dict(data: object, *, source: str = "cluster") -> Cluster:
    """A cluster from a mapping. Raises InvalidCluster with the path of each bad field."""
    if not isinstance(data, dict):
        raise InvalidCluster(f"{source}: expected a mapping with gpu and num_gpus, or nodes, got {type(data).__name__}")
    try:
        description = ClusterDescription.model_validate(data)
    except pydantic.ValidationError as error:
        raise InvalidCluster(f"{source} is not a valid cluster:\n{bad_fields(error, 'cluster')}") from error
    return description.cluster()


def cluster_from_yaml(text: str, *, source: str = "cluster") -> Cluster:
    """A cluster from YAML text. Raises InvalidCluster."""
    return cluster_from_dict(parse_yaml(text, source, InvalidCluster), source=source)
