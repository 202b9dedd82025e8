"""Figures fitted to times that the cost model itself made are those it made them with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.cost_model.communication.collectives import collective_time, lost_beside, point_to_point_time
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import MIB
from autopar.cost_model.hardware.functions import ElementTime
from autopar.cost_model.hardware.matmul_efficiency import fraction_of_rate
from autopar.ir.mesh import Mesh
from autopar.profiling.compare import compare
from autopar.profiling.fit import description_of
from autopar.profiling.links import axes_of
from autopar.profiling.samples import (
    COLLECTIVES,
    KINDS,
    AttentionRun,
    Communicated,
    Overlapped,
    Product,
    Samples,
    Traffic,
    Waited,
)

SHAPES = [(n, n, n) for n in (512, 1024, 4096, 8192)] + [(8192, 4096, 64), (8192, 4096, 256), (256, 4096, 4096)]
SIZES = [1 << power for power in range(12, 31, 2)]
RELATIVE = {
    "all_gather": 1.5,
    "reduce_scatter": 1.25,
    "all_to_all": 2.0,
    "send": 0.5,
    "zero_gather": 1.2,
    "zero_scatter": 2.5,
}


def true_cluster() -> Cluster:
    base = make_cluster("a100", 32)
    rate = replace(base.device.matmul_rate("bf16"), efficiency=0.6, attention_efficiency=0.3)
    tiling = replace(base.device.tiling, half_depth=64.0)
    device = replace(base.device, matmul=(rate,), tiling=tiling, memory_bandwidth=1.5e12, memory_efficiency=1.0)
    device = replace(device, optimizer_bandwidth=1.8e12)
    relative = tuple(RELATIVE.items())
    links = [
        replace(link, bandwidth=b, efficiency=1.0, base_latency_s=2e-5, hop_latency_s=4e-6, relative_time=relative)
        for link, b in ((base.intra_node, 200e9), (base.inter_node, 10e9))
    ]
    return replace(base, device=replace(device, kernel_launch_s=5e-6), intra_node=links[0], inter_node=links[1])


def samples_of(cluster: Cluster) -> Samples:
    device = cluster.device
    rate = device.matmul_rate("bf16")
    found = Samples(launch_s=device.kernel_launch_s)
    for shape in SHAPES:
        reached = rate.peak_flops * rate.efficiency * fraction_of_rate(device.tiling, *shape)
        flops = 2.0 * shape[0] * shape[1] * shape[2]
        found.products.append(Product("bf16", *shape, flops / reached + device.kernel_launch_s))
    found.attention.append(AttentionRun("bf16", 1e12, 1e12 / (rate.peak_flops * rate.attention_efficiency)))
    found.traffic.append(Traffic(10**9, device.memory_seconds(1e9) + device.kernel_launch_s))
    found.optimizer.append(Traffic(10**9, device.optimizer_seconds(1e9)))
    for mesh, axis in axes_of(cluster):
        group = cluster.group(mesh, axis)
        link = cluster.inter_node if group.spans_nodes else cluster.intra_node
        for kind in KINDS:
            for size in SIZES:
                seconds = (
                    point_to_point_time(size, link)
                    if kind == "send"
                    else collective_time(COLLECTIVES[kind], size, group, cluster, kind)
                )
                found.communicated.append(Communicated(kind, group, size, seconds))
    return found


def test_what_made_the_times_is_found() -> None:
    truth = true_cluster()
    samples = samples_of(truth)
    described = description_of(samples, make_cluster("a100", 32), "a100-80gb")
    fitted = cluster_from_dict(described)
    rate = fitted.device.matmul_rate("bf16")
    assert (rate.peak_flops, rate.efficiency) == (312e12, pytest.approx(0.6, rel=1e-3))
    assert rate.attention_efficiency == pytest.approx(0.3, rel=1e-3)
    assert fitted.device.tiling.half_depth == 64.0
    assert fitted.device.memory_seconds(1.5e12) == pytest.approx(1.0, rel=1e-3)
    assert fitted.device.optimizer_seconds(1.8e12) == pytest.approx(1.0, rel=1e-3)
    assert fitted.device.kernel_launch_s == pytest.approx(5e-6, rel=1e-3)
    for name in ("intra_node", "inter_node"):
        found, true = getattr(fitted, name), getattr(truth, name)
        assert found.ring_bandwidth(8) == pytest.approx(true.ring_bandwidth(8), rel=0.1)
        assert dict(found.relative_time) == pytest.approx({"all_reduce": 1.0} | RELATIVE, rel=0.15)
    errors = [abs(point.error) for series in compare(samples, fitted) for point in series.points]
    assert sorted(errors)[len(errors) * 9 // 10] < 0.15


def test_what_one_device_reaches_alone_what_overlaps_and_what_ranks_wait() -> None:
    truth = true_cluster()
    alone = replace(truth.inter_node, alone=30e9)
    samples = samples_of(truth)
    group = truth.group(Mesh.of(stage=4, rank=8), 0)
    for size in SIZES:
        seconds = point_to_point_time(size, alone.among(1, 8))
        samples.communicated.append(Communicated("send", group, size, seconds, alone=True))
    lost = lost_beside(group.ranks_per_node * truth.inter_node.ring_bandwidth(2), truth.device)
    samples.overlapped.append(Overlapped(group, 0.6, 1.0, 1.0 + 0.6 * lost))
    inside = truth.group(Mesh.of(stage=4, rank=8), 1)
    samples.overlapped.append(Overlapped(inside, 0.6, 1.0, 1.7))
    samples.waited += [
        Waited(inside, 16e-3, 3e-3, 1e-3),
        Waited(group, 4e-3, 3e-3, 1e-3),
        Waited(group, 4e-3, 1e-3, 2e-3),
    ]
    fitted = cluster_from_dict(description_of(samples, make_cluster("a100", 32), "a100-80gb"))
    assert fitted.inter_node.alone == pytest.approx(30e9, rel=0.1)
    assert fitted.intra_node.alone is None
    assert fitted.inter_node.overlap == pytest.approx(1.0, rel=1e-3)
    assert fitted.intra_node.overlap == 0.0
    assert fitted.device.jitter_s == pytest.approx(0.5e-3)


def test_messages_that_were_delayed_do_not_count() -> None:
    truth = true_cluster()
    samples = samples_of(truth)
    for number in range(0, len(samples.communicated), 5):
        one = samples.communicated[number]
        samples.communicated[number] = replace(one, seconds=4 * one.seconds)
    fitted = cluster_from_dict(description_of(samples, make_cluster("a100", 32), "a100-80gb"))
    assert fitted.inter_node.ring_bandwidth(8) == pytest.approx(truth.inter_node.ring_bandwidth(8), rel=0.05)
    assert fitted.inter_node.relative("send") == pytest.approx(RELATIVE["send"], rel=0.05)


def test_a_pass_in_which_the_machine_was_busy_does_not_count() -> None:
    truth = true_cluster()
    passes = [samples_of(truth) for _ in range(3)]
    group = truth.group(Mesh.of(stage=4, rank=8), 0)
    for number, samples in enumerate(passes):
        busy = 10.0 if number == 1 else 1.0
        samples.waited.append(Waited(group, 1e-3, 1e-3 + busy * 1e-3, 1e-3))
        samples.launch_s *= busy
        samples.products = [replace(one, seconds=busy * one.seconds) for one in samples.products]
    # What took too long for its turn is left out of a pass.
    del passes[1].communicated[10:]
    found = Samples.typical(passes)
    assert (found.products, found.communicated) == (passes[0].products, passes[0].communicated)
    fitted = cluster_from_dict(description_of(found, make_cluster("a100", 32), "a100-80gb"))
    assert fitted.device.jitter_s == pytest.approx(1e-3)
    assert fitted.device.kernel_launch_s == pytest.approx(5e-6, rel=1e-3)


def test_large_products_decide_on_a_core() -> None:
    """Most of them are small and much faster by their FLOPs than is thought: steps are made of the large one."""
    core = make_cluster("cpu", 1, 1)
    samples = Samples(launch_s=1e-6)
    samples.attention.append(AttentionRun("fp32", 1e9, 1e-1, 256))
    samples.traffic.append(Traffic(10**9, 1e-1))
    samples.products += [Product("fp32", 96, 96, 96, 2 * 96**3 / 200e9) for _ in range(20)]
    samples.products.append(Product("fp32", 1920, 1920, 1920, 2 * 1920**3 / 100e9))
    rate = cluster_from_dict(description_of(samples, core, "cpu")).device.matmul_rate("fp32")
    assert rate.peak_flops * rate.efficiency == pytest.approx(100e9, rel=0.05)


def test_functions_of_elements_are_those_of_a_typical_pass() -> None:
    passes = [Samples(launch_s=1e-6) for _ in range(3)]
    for samples, seconds in zip(passes, (2e-9, 9e-9, 2.5e-9), strict=True):
        samples.attention.append(AttentionRun("fp32", 1e9, 1e-1, 256))
        samples.traffic.append(Traffic(10**9, 1e-1))
        samples.products.append(Product("fp32", 960, 960, 960, 1e-2))
        samples.functions["tanh"] = ElementTime(seconds, seconds / 5)
    described = description_of(Samples.typical(passes), make_cluster("cpu", 1, 1), "cpu")
    assert described["functions_ns"] == {"tanh": [2.5, 0.5]}
    device = cluster_from_dict(described).device
    assert device.function_time("tanh") == pytest.approx((2.5e-9, 0.5e-9))
    assert device.function_time("exp") == (0.0, 0.0)


def test_axes_inside_nodes_between_them_and_over_all() -> None:
    def groups(count: int, per_node: int) -> set[tuple[int, int]]:
        cluster = make_cluster("a100", count, per_node)
        found = [cluster.group(mesh, axis) for mesh, axis in axes_of(cluster)]
        return {(group.size, group.num_nodes) for group in found}

    assert groups(4, 4) == {(2, 1), (4, 1)}
    assert groups(4, 2) == {(2, 1), (2, 2), (4, 2)}
    assert groups(24, 8) == {(2, 1), (4, 1), (8, 1), (3, 3), (24, 3)}
    assert groups(2, 1) == {(2, 2)}


def test_bytes_that_never_cost_anything_still_have_a_rate() -> None:
    """Latency alone explains the times: the largest message then bounds the rate."""
    truth = true_cluster()
    samples = samples_of(truth)
    for number, one in enumerate(samples.communicated):
        samples.communicated[number] = replace(one, seconds=1e-4)
    described = description_of(samples, make_cluster("a100", 32), "a100-80gb")
    fitted = cluster_from_dict(described)
    assert fitted.intra_node.bandwidth > 0
    assert all(value > 0 for _, value in fitted.intra_node.relative_time)


def test_kernels_of_few_bytes_have_a_rate_of_their_own_on_a_core() -> None:
    core = replace(make_cluster("cpu", 2), device=replace(make_cluster("cpu", 2).device, kernel_launch_s=5e-6))
    samples = Samples(launch_s=5e-6, products=samples_of(true_cluster()).products)
    samples.attention.append(AttentionRun("bf16", 1e9, 0.1, 512))
    rates = {MIB: 30e9, 16 * MIB: 15e9, 64 * MIB: 10e9}
    for kernel, rate in rates.items():
        samples.traffic.append(Traffic(4 * kernel, 4 * (kernel / rate + 5e-6), 4))
    fitted = cluster_from_dict(description_of(samples, core, "cpu")).device
    for kernel, rate in rates.items():
        assert fitted.kernel_seconds(kernel) == pytest.approx(kernel / rate, rel=1e-3)
    assert fitted.kernel_seconds(4 * MIB) == pytest.approx(4 * MIB / 22.5e9, rel=1e-3), "between them, by the logarithm"
    assert fitted.memory_seconds(1e9) == pytest.approx(1e9 / 12.5e9, rel=1e-3), "of what no cache holds"
    gpu = cluster_from_dict(description_of(samples, make_cluster("a100", 32), "a100-80gb")).device
    assert gpu.bandwidth_by_size == ()
