"""The closed form of groups and collectives against the links of the cluster's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.collectives import collective_time, volume_bytes
from autopar.cost_model.hardware.cluster import Cluster, Pods
from autopar.cost_model.hardware.topology import (
    all_to_all_paths,
    axis_link,
    busiest_link,
    groups_of,
    path,
    send_link,
    topology,
)
from autopar.ir.mesh import Mesh
from autopar.ir.redistribution import Collective

# With a switch in each node, and with links from device to device.
GPUS = ("h100-sxm", "a100-80gb", "mi300x")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    shapes = [shape for shape in product((1, 2, 4, 8), repeat=2) if shape != (1, 1)]
    per_node, num_nodes = draw(st.sampled_from(shapes))
    cluster = make_cluster(draw(st.sampled_from(GPUS)), per_node * num_nodes, per_node)
    # A switch that reduces is no ring.
    cluster = replace(cluster, intra_node=replace(cluster.intra_node, switch_reduce=None))
    if num_nodes > 2 and draw(st.booleans()):
        pods = Pods(num_nodes=draw(st.sampled_from([1, 2])), oversubscription=draw(st.sampled_from([1.0, 2.0, 8.0])))
        cluster = replace(cluster, pods=pods)
    return cluster


@st.composite
def meshes(draw: st.DrawFn, size: int) -> Mesh:
    sizes = []
    while size > 1 and len(sizes) < 4:
        own = draw(st.sampled_from([n for n in (2, 4, 8, 16, 32, 64) if size % n == 0]))
        sizes.append(own)
        size //= own
    return Mesh.of(**{f"a{number}": own for number, own in enumerate([*sizes, *([size] if size > 1 else [])])})


def seconds_a_byte(collective: Collective, cluster: Cluster, mesh: Mesh, axes: Sequence[int]) -> float:
    """Of the closed form, without latency."""
    group = cluster.group(mesh, axes)
    link = cluster.inter_node if group.spans_nodes else cluster.intra_node
    one, two = (collective_time(collective, payload, group, cluster) for payload in (1e12, 2e12))
    return (two - one) / 1e12 / link.relative(collective.value)


@given(st.data())
def test_the_closed_form_is_the_busiest_link(data: st.DataObject) -> None:
    cluster = data.draw(clusters())
    stages = data.draw(st.sampled_from([n for n in (1, 2, 4) if cluster.num_gpus % n == 0 and cluster.num_gpus > n]))
    mesh = data.draw(meshes(cluster.num_gpus // stages))
    axes = data.draw(st.lists(st.sampled_from(range(len(mesh))), min_size=1, unique=True))
    groups, graph = groups_of(mesh, axes, stages), topology(cluster)
    ring = axis_link(cluster, mesh, axes, stages)
    all_to_all = busiest_link(graph, (one for ranks in groups for one in all_to_all_paths(graph, ranks)))
    for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        expected = volume_bytes(collective, 1.0, len(groups[0])) / ring.bandwidth
        assert seconds_a_byte(collective, cluster, mesh, axes) == pytest.approx(expected, rel=1e-6)
    found = seconds_a_byte(Collective.ALL_TO_ALL, cluster, mesh, axes)
    assert found == pytest.approx(1.0 / all_to_all.bandwidth, rel=1e-6)
    for sender in range(stages - 1):
        closed = cluster.send_link(mesh, sender, sender + 1).ring_bandwidth(2)
        assert closed == pytest.approx(send_link(cluster, mesh, sender, sender + 1).bandwidth, rel=1e-6)


@given(clusters(), st.data())
def test_paths_are_the_quickest(cluster: Cluster, data: st.DataObject) -> None:
    graph, ranks = topology(cluster), st.integers(0, cluster.num_gpus - 1)
    sender, receiver = data.draw(ranks), data.draw(ranks)
    found = path(graph, sender, receiver)
    if sender == receiver:
        return
    latency = nx.path_weight(graph, found, "latency_s")
    assert latency == pytest.approx(nx.shortest_path_length(graph, sender, receiver, "latency_s"))
    inside = sender // cluster.gpus_per_node == receiver // cluster.gpus_per_node
    assert latency == pytest.approx((cluster.intra_node if inside else cluster.inter_node).hop_latency_s)


def test_groups_are_those_of_the_mesh() -> None:
    assert groups_of(Mesh.of(dp=2, tp=2), [0], 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_of(Mesh.of(dp=2, tp=2), [1], 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(Mesh.of(dp=2, cp=2, tp=2), [2, 0], 1) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_link_that_is_waited_for_has_a_name() -> None:
    cluster, mesh = make_cluster("h100-sxm", 64), Mesh.of(dp=8, tp=8)
    assert axis_link(cluster, mesh, [1], 1).name == cluster.intra_node.name
    assert axis_link(cluster, mesh, [0], 1).name == cluster.inter_node.name
    narrow = replace(cluster, pods=Pods(num_nodes=2, oversubscription=8.0))
    assert axis_link(narrow, mesh, [0], 1).name == f"{cluster.inter_node.name} between pods"
    assert axis_link(narrow, mesh, [1], 1) == axis_link(cluster, mesh, [1], 1)
