"""Which ranks a mesh axis joins, and how many nodes they are on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.cluster import Group
from autopar.ir.mesh import Mesh


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
