"""Which ranks a mesh axis joins, and how many nodes they are on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.cluster_file import cluster_from_yaml
from autopar.cost_model.communication.collectives import collective_time
from autopar.cost_model.hardware.cluster import Group
from autopar.ir.errors import InvalidCluster
from autopar.ir.mesh import Mesh
from autopar.ir.redistribution import Collective


def test_inner_axis_stays_in_the_node_and_outer_axis_crosses() -> None:
    cluster, mesh = make_cluster("a100-80gb", 64), Mesh.of(dp=8, tp=8)
    assert cluster.group(mesh, 1) == Group(size=8, num_nodes=1, ranks_per_node=8, stride=1, nodes_per_pod=1)
    assert cluster.group(mesh, 0) == Group(size=8, num_nodes=8, ranks_per_node=1, stride=8, nodes_per_pod=8)
    assert cluster.group(mesh, (0, 1)) == Group(size=64, num_nodes=8, ranks_per_node=8, stride=1, nodes_per_pod=8)


def test_axis_that_is_partly_in_the_node() -> None:
    cluster, mesh = make_cluster("a100-80gb", 32), Mesh.of(dp=16, tp=2)
    assert cluster.group(mesh, 0) == Group(size=16, num_nodes=4, ranks_per_node=4, stride=2, nodes_per_pod=4)


def test_axes_need_not_be_neighbours() -> None:
    cluster, mesh = make_cluster("a100-80gb", 32), Mesh.of(dp=4, sp=2, tp=4)
    assert cluster.group(mesh, (0, 2)) == Group(size=16, num_nodes=4, ranks_per_node=4, stride=1, nodes_per_pod=4)
    assert cluster.group(mesh, (0, 1)) == Group(size=8, num_nodes=4, ranks_per_node=2, stride=4, nodes_per_pod=4)


def test_stages_that_straddle_nodes_take_the_worst_group() -> None:
    cluster, mesh = make_cluster("a100-80gb", 24), Mesh.of(dp=2, tp=6)
    group = cluster.group(mesh, 1)
    assert (group.num_nodes, group.ranks_per_node) == (2, 2)


def test_stage_links() -> None:
    cluster = make_cluster("h100-sxm", 16)
    assert cluster.stage_link(Mesh.of(tp=4), 2) is cluster.intra_node
    assert cluster.stage_link(Mesh.of(tp=4), 4) is cluster.inter_node
    assert cluster.stage_link(Mesh.of(tp=8), 2) is cluster.inter_node
    assert cluster.stage_link(Mesh.of(tp=8), 1) is cluster.intra_node


def test_sends_between_stages() -> None:
    """Two ranks a node: of a pipeline of four only the middle send leaves a node, and has the link for itself."""
    cluster = make_cluster("h100-sxm", 4, 2)
    inter = replace(cluster.inter_node, bandwidth=10.0, efficiency=0.5, alone=8.0)
    cluster = replace(cluster, inter_node=inter)
    one, two = Mesh.of(tp=1), Mesh.of(tp=2)
    assert cluster.send_link(one, 0, 1) is cluster.intra_node
    assert cluster.send_link(one, 1, 2).ring_bandwidth(2) == 8.0
    assert cluster.send_link(one, 3, 0).ring_bandwidth(2) == 8.0
    assert cluster.send_link(two, 0, 1) is inter
    # Two links' worth at most, whatever one device could reach.
    assert replace(inter, alone=80.0).among(1, 2).ring_bandwidth(2) == 10.0
    assert replace(inter, alone=None).among(1, 2).ring_bandwidth(2) == 5.0


def test_groups_over_stages() -> None:
    cluster = make_cluster("h100-sxm", 16, 8)
    first_and_last = cluster.group_over_stages(Mesh.of(tp=4), (0, 3))
    assert (first_and_last.size, first_and_last.num_nodes, first_and_last.ranks_per_node) == (2, 2, 1)
    neighbours = cluster.group_over_stages(Mesh.of(tp=4), (0, 1))
    assert (neighbours.size, neighbours.num_nodes, neighbours.ranks_per_node) == (2, 1, 2)


sizes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)


@given(sizes, st.integers(1, 3), st.sampled_from([1, 2, 4, 6, 8]), st.data())
def test_group_equals_enumeration(shape: list[int], stages: int, per_node: int, data: st.DataObject) -> None:
    mesh = Mesh.of(**{f"a{i}": n for i, n in enumerate(shape)})
    total = mesh.size * stages
    if total > per_node and total % per_node:
        return
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    cluster = make_cluster("a100", total, per_node)
    found: dict[tuple[int, ...], list[int]] = {}
    for stage in range(stages):
        for rank, place in enumerate(product(*map(range, shape))):
            rest = (stage, *(p for a, p in enumerate(place) if a not in axes))
            found.setdefault(rest, []).append((stage * mesh.size + rank) // per_node)
    spans = [(len(set(nodes)), min(nodes.count(n) for n in nodes)) for nodes in found.values()]
    most = max(nodes for nodes, _ in spans)
    group = cluster.group(mesh, axes)
    assert group.num_nodes == most
    assert group.ranks_per_node == min(ranks for nodes, ranks in spans if nodes == most)
    assert group.size == len(next(iter(found.values())))


def test_memory_limit() -> None:
    cluster = make_cluster("h100-sxm", 8).with_memory(10**9)
    assert cluster.device.usable_bytes == 10**9
    with pytest.raises(AttributeError):
        cluster.num_gpus = 4  # type: ignore[misc]


PODS = """
gpu: h100-sxm
num_gpus: 64
pods: {num_nodes: 2, oversubscription: 4}
"""


def test_pods_slow_down_rings_with_few_nodes_in_each() -> None:
    """One ring of all ranks leaves each pod once a channel, and so do eight rings of one rank a node, all at once."""
    cluster = cluster_from_yaml(PODS)
    mesh = Mesh.of(dp=8, tp=8)
    across, every, inside = cluster.group(mesh, 0), cluster.group(mesh, (0, 1)), cluster.group(Mesh.of(dp=4, tp=16), 1)
    assert (across.num_pods, across.nodes_per_pod) == (every.num_pods, every.nodes_per_pod) == (4, 2)
    assert (inside.num_nodes, inside.num_pods) == (2, 1)
    assert cluster.share_between_pods(across) == cluster.share_between_pods(every) == 0.5
    assert cluster.share_between_pods(inside) == 1.0
    wide = replace(cluster, pods=None)
    for collective in Collective:
        if not collective.communicates:
            continue
        for group in (across, inside):
            slow, fast = (collective_time(collective, 1e9, group, one) for one in (cluster, wide))
            assert slow == pytest.approx(fast) if group is inside else slow > 1.5 * fast


def test_an_all_to_all_between_pods_has_what_leaves_them() -> None:
    cluster = cluster_from_yaml(PODS)
    group = cluster.group(Mesh.of(ep=64), 0)
    nic = cluster.inter_node.ring_bandwidth(2)
    expected = 48 / 64 * 1e9 * 4 / nic  # three pods of four are elsewhere
    assert collective_time(Collective.ALL_TO_ALL, 1e9, group, cluster) == pytest.approx(expected, rel=1e-2)


def test_stages_in_different_pods_send_through_what_leaves_them() -> None:
    cluster = cluster_from_yaml(PODS)
    inter = cluster.inter_node.ring_bandwidth(2)
    whole_pods = Mesh.of(dp=2, tp=8)
    assert cluster.send_link(whole_pods, 0, 1).ring_bandwidth(2) == pytest.approx(inter / 4)
    one_node = Mesh.of(tp=8)
    assert cluster.send_link(one_node, 0, 1).ring_bandwidth(2) == inter
    assert cluster.send_link(one_node, 1, 2).ring_bandwidth(2) == pytest.approx(inter / 2), "half of the pod sends"


def test_fewer_cards_than_gpus() -> None:
    cluster = cluster_from_yaml("gpu: h100-sxm\nnum_gpus: 16\nnics: {per_node: 2, bandwidth_gb_s: 25}\n")
    efficiency = cluster.inter_node.efficiency
    assert cluster.inter_node.ring_bandwidth(2) == pytest.approx(2 * 25e9 / 8 * efficiency)
    assert cluster.inter_node.among(1, 8).ring_bandwidth(2) == pytest.approx(25e9 * efficiency)
    assert cluster.inter_node.among(4, 8).ring_bandwidth(2) == pytest.approx(2 * 25e9 / 4 * efficiency)


def test_nodes_of_several_kinds_are_as_slow_as_the_slowest() -> None:
    both = cluster_from_yaml("nodes: [{gpu: a100-80gb, num_nodes: 2}, {gpu: h200, num_nodes: 1}]\n")
    a100, h200 = make_cluster("a100-80gb", 8), make_cluster("h200", 8)
    assert both.num_gpus == 24
    assert both.device.matmul_rate("bf16") == a100.device.matmul_rate("bf16")
    assert both.device.usable_bytes == min(a100.device.usable_bytes, h200.device.usable_bytes)
    slowest = max(cluster.device.memory_seconds(1e9) for cluster in (a100, h200))
    assert both.device.memory_seconds(1e9) == slowest
    for link in ("intra_node", "inter_node"):
        least = min(getattr(cluster, link).ring_bandwidth(8) for cluster in (a100, h200))
        assert getattr(both, link).ring_bandwidth(8) == least
    assert both.device.name == f"{a100.device.name} and {h200.device.name}"


def test_jitter_is_part_of_every_collective_and_adds_up_at_random() -> None:
    cluster = cluster_from_yaml("gpu: cpu\nnum_gpus: 4\njitter_us: 700\n")
    group = cluster.group(Mesh.of(dp=4), 0)
    noise_free = replace(cluster, device=replace(cluster.device, jitter_s=0.0))
    slow, fast = (collective_time(Collective.ALL_REDUCE, 1e6, group, one) for one in (cluster, noise_free))
    assert slow - fast == pytest.approx(0.7e-3)
    assert cluster.device.straggler_delay_s(4e-3, 1) == pytest.approx(1.4e-3)
    assert cluster.device.straggler_delay_s(1e-3, 9) == pytest.approx(2.1e-3)
    assert noise_free.device.straggler_delay_s(1.0, 100) == 0.0


def test_functions_of_elements_are_measured_or_shares_of_a_gelu() -> None:
    described = "gpu: cpu\nnum_gpus: 1\ntranscendental_ns: 2\nfunctions_ns: {tanh: [3, 1]}\n"
    device = cluster_from_yaml(described).device
    assert device.function_time("gelu_tanh") == pytest.approx((2e-9, 2e-9))
    assert device.function_time("tanh") == pytest.approx((3e-9, 1e-9))
    assert device.function_time("cos") == (0.0, 0.0)
    with pytest.raises(InvalidCluster, match=r"functions_ns"):
        cluster_from_yaml(described.replace("tanh:", "tangent:"))
