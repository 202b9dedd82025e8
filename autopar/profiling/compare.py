"""Measured against what the cost model says with the fitted figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_model.communication.collectives import collective_time, point_to_point_time
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.hardware.matmul_efficiency import fraction_of_rate
from autopar.profiling.samples import COLLECTIVES, Communicated, Product, Samples


@dataclass(frozen=True, slots=True)
class Point:
    """size: FLOPs or bytes."""

    size: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements of one kind. unit: of the sizes."""

    name: str
    unit: str
    points: tuple[Point, ...]


def compare(samples: Samples, cluster: Cluster) -> list[Series]:
    """One series for each precision, and for each kind of communication and group."""
    # These collectives have too little before them for ranks to wait for each other.
    cluster = replace(cluster, device=replace(cluster.device, jitter_s=0.0))
    device = cluster.device
    found: dict[tuple[str, str], list[Point]] = {}

    def add(name: str, unit: str, size: float, measured_s: float, predicted_s: float) -> None:
        found.setdefault((name, unit), []).append(Point(size, measured_s, predicted_s))

    for product in samples.products:
        name = f"matrix products, {product.precision}"
        add(name, "FLOPs", product.flops, product.seconds, _product_s(product, device))
    for run in samples.attention:
        rate = device.matmul_rate(run.precision)
        predicted = run.flops / (rate.peak_flops * rate.attention_at(run.length))
        add(f"attention, {run.precision}", "FLOPs", run.flops, run.seconds, predicted)
    for traffic in samples.traffic:
        predicted = traffic.num_kernels * (device.kernel_seconds(traffic.kernel_bytes) + device.kernel_launch_s)
        add("memory", "bytes", traffic.kernel_bytes, traffic.seconds, predicted)
    for step in samples.optimizer:
        add("optimiser", "bytes", step.num_bytes, step.seconds, device.optimizer_seconds(step.num_bytes))
    for one in samples.communicated:
        name = f"{one.kind}, {one.group}" + (", others idle" if one.alone else "")
        add(name, "bytes", one.payload_bytes, one.seconds, _communicated_s(one, cluster))
    return [Series(name, unit, tuple(points)) for (name, unit), points in found.items()]


def _product_s(product: Product, device: Device) -> float:
    rate = device.matmul_rate(product.precision)
    reached = fraction_of_rate(device.tiling, product.rows, product.columns, product.depth)
    computing = product.flops / (rate.peak_flops * rate.efficiency * reached)
    moving = device.kernel_seconds(product.num_bytes)
    return (computing + moving if device.is_cpu else max(computing, moving)) + device.kernel_launch_s


def _communicated_s(one: Communicated, cluster: Cluster) -> float:
    if one.kind == "send":
        link = cluster.inter_node if one.group.spans_nodes else cluster.intra_node
        if one.alone:
            link = link.among(1, cluster.gpus_per_node)
        return point_to_point_time(one.payload_bytes, link)
    return collective_time(COLLECTIVES[one.kind], one.payload_bytes, one.group, cluster, one.kind)
