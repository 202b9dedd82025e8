"""One kind of node in place of several: what every rank waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import Device, Link, MatmulRate
from autopar.cost_model.hardware.functions import slowest as slowest_functions


def slowest_of(clusters: Sequence[Cluster], num_nodes: int) -> Cluster:
    """``num_nodes`` nodes with the least of every figure that the devices and links of ``clusters`` have."""
    first = clusters[0]
    return replace(
        first,
        device=_slowest_device([cluster.device for cluster in clusters]),
        num_gpus=num_nodes * first.gpus_per_node,
        intra_node=_slowest_link([cluster.intra_node for cluster in clusters]),
        inter_node=_slowest_link([cluster.inter_node for cluster in clusters]),
    )


def _slowest_device(devices: Sequence[Device]) -> Device:
    shared = [name for name in devices[0].precisions if all(name in device.precisions for device in devices)]
    rates = [_slowest_rate([device.matmul_rate(precision) for device in devices]) for precision in shared]
    memory = min(devices, key=lambda device: device.memory_bandwidth * device.memory_efficiency)
    room = min(devices, key=lambda device: device.usable_bytes)
    host = min(devices, key=lambda device: device.host.link_bandwidth * device.host.link_efficiency)
    disks = [device.disk for device in devices]
    last = [device.matmul_rate(shared[-1]) if shared else device.matmul[-1] for device in devices]
    slowest = min(zip(devices, last, strict=True), key=lambda own: own[1].peak_flops * own[1].efficiency)[0]
    return replace(
        slowest,
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        matmul=tuple(rates),
        memory_bytes=room.memory_bytes,
        reserved_bytes=room.reserved_bytes,
        memory_bandwidth=memory.memory_bandwidth,
        memory_efficiency=memory.memory_efficiency,
        bandwidth_by_size=memory.bandwidth_by_size,
        kernel_launch_s=max(device.kernel_launch_s for device in devices),
        functions=slowest_functions(device.functions for device in devices),
        jitter_s=max(device.jitter_s for device in devices),
        host=replace(host.host, memory_bytes=min(device.host.memory_bytes for device in devices)),
        disk=None if None in disks else min(filter(None, disks), key=lambda disk: disk.seconds(1.0, 1.0)),
        is_cpu=any(device.is_cpu for device in devices),
    )


def _slowest_rate(rates: Sequence[MatmulRate]) -> MatmulRate:
    slowest = min(rates, key=lambda rate: rate.peak_flops * rate.efficiency)
    attention = min(rate.peak_flops * rate.attention_efficiency for rate in rates)
    if attention == slowest.peak_flops * slowest.attention_efficiency:
        return slowest
    return replace(
        slowest,
        attention_efficiency=attention / slowest.peak_flops,
        attention_by_length=(),
        block_of_keys=None,
        attention=None,
    )


def _slowest_link(links: Sequence[Link]) -> Link:
    slowest = min(links, key=lambda link: link.ring_bandwidth(8))
    return replace(
        slowest,
        base_latency_s=max(link.base_latency_s for link in links),
        hop_latency_s=max(link.hop_latency_s for link in links),
        switch_reduce=None,
    )
