"""A cluster as a graph of devices, switches and links, and the load of a group's communication on them.

    device ──── switch of its node                       link inside a node
       └─────── switch of its pod ──── core              the device's NIC; what may leave a pod

Devices are the vertices 0, 1, .. in the order of ranks. A node without a switch joins its devices in pairs, each behind
a port for all pairs of its device. Links carry their bandwidth in both directions at once.

A ring runs around the devices of each node, and from node to node on one channel for each device of the node with the
fewest; channel c leaves and enters a node by the NIC of its device c. In an all-to-all every device sends to every
other. What a link carries, over its bandwidth, is how long it is busy, and a group waits for its busiest link.

The search prices groups in closed form (``Cluster.group``, ``communication.collectives``): 0.3 ms for an axis of 16,384
devices, for which the graph takes 110 ms. A test holds that both agree wherever groups fill nodes and pods evenly.
Where they do not, the closed form takes one group for all: the one on most nodes. Behind a pod's narrow switch that is
mostly too slow, and can be 1.8 times too fast where another group is the one that leaves the pod.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import networkx as nx
import numpy as np

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.mesh import Mesh

# A device by its rank; a switch or a port by its kind and number.
Vertex = int | tuple[str, int]
# Vertices from one device to another, and the share of a rank's bytes that goes there.
Path = tuple[Sequence[Vertex], float]

_CORE: Vertex = ("core", 0)


class Busiest(NamedTuple):
    """The link that a group waits for. name: of the link. bandwidth: bytes/s of each rank at which it is busy."""

    name: str
    bandwidth: float


@lru_cache(maxsize=8)
def topology(cluster: Cluster) -> nx.Graph[Vertex]:
    """The graph of a cluster: 5 µs a device.

    Devices have ``node``, ``pod`` (numbers) and ``local`` (vertex that leads to their node). Edges have the ``name`` of
    their link, ``bandwidth`` in bytes/s as achieved, and ``latency_s``, which adds up along a path to that of a hop.
    """
    graph: nx.Graph[Vertex] = nx.Graph()
    intra, inter, pods = cluster.intra_node, cluster.inter_node, cluster.pods
    per_node, pod_nodes = cluster.gpus_per_node, cluster.num_nodes if pods is None else pods.num_nodes
    switched = intra.peer_bandwidth is None
    nic, port = inter.ring_bandwidth(2), intra.bandwidth * intra.efficiency
    for device in range(cluster.num_gpus):
        node = device // per_node
        local: Vertex = ("node", node) if switched else ("port", device)
        graph.add_node(device, node=node, pod=node // pod_nodes, local=local)
        graph.add_edge(device, local, name=intra.name, bandwidth=port, latency_s=intra.hop_latency_s / 2 * switched)
        if intra.peer_bandwidth is not None:
            pairs = [(local, ("port", other)) for other in range(node * per_node, device)]
            peer = intra.peer_bandwidth * intra.efficiency
            graph.add_edges_from(pairs, name=intra.name, bandwidth=peer, latency_s=intra.hop_latency_s)
        if cluster.num_nodes > 1:
            switch = ("pod", node // pod_nodes)
            graph.add_edge(device, switch, name=inter.name, bandwidth=nic, latency_s=inter.hop_latency_s / 2)
    if pods is not None:
        leaving = per_node * pod_nodes * nic / pods.oversubscription
        for pod in range(-(-cluster.num_nodes // pod_nodes)):
            graph.add_edge(("pod", pod), _CORE, name=f"{inter.name} between pods", bandwidth=leaving, latency_s=0.0)
    return graph


def path(graph: nx.Graph[Vertex], sender: int, receiver: int) -> Sequence[Vertex]:
    """The vertices from one device to another: inside the node if both are on one, else from NIC to NIC."""
    here, there = graph.nodes[sender], graph.nodes[receiver]
    between: tuple[Vertex, ...]
    if here["node"] == there["node"]:
        between = (here["local"], there["local"])
    elif here["pod"] == there["pod"]:
        between = (("pod", here["pod"]),)
    else:
        between = (("pod", here["pod"]), _CORE, ("pod", there["pod"]))
    return sender, *dict.fromkeys(between), receiver


def ring_paths(graph: nx.Graph[Vertex], ranks: Sequence[int]) -> Iterator[Path]:
    """Paths of a ring of a group, each with its share of the bytes that a rank sends to its neighbour."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(graph.nodes[rank]["node"], []).append(rank)
    for own in nodes.values():
        # Where there is no switch, rings at all distances use all pairs alike.
        paired = graph.nodes[own[0]]["local"][0] == "port"
        distances = range(1, len(own) if paired else min(2, len(own)))
        for distance in distances:
            for place, rank in enumerate(own):
                yield path(graph, rank, own[(place + distance) % len(own)]), 1.0 / len(distances)
    channels = min(map(len, nodes.values()))
    for here, there in pairwise([*nodes.values(), next(iter(nodes.values()))] if len(nodes) > 1 else []):
        for channel in range(channels):
            yield path(graph, here[channel], there[channel]), 1.0 / channels


def all_to_all_paths(graph: nx.Graph[Vertex], ranks: Sequence[int]) -> Iterator[Path]:
    """Paths between all pairs of a group, each with its share of the bytes that a rank has in an all-to-all."""
    for sender in ranks:
        for receiver in ranks:
            if sender != receiver:
                yield path(graph, sender, receiver), 1.0 / len(ranks)


def busiest_link(graph: nx.Graph[Vertex], paths: Iterable[Path]) -> Busiest:
    """The link that is busy longest while all of ``paths``, of all groups that communicate at once, are sent."""
    loads: defaultdict[tuple[Vertex, Vertex], float] = defaultdict(float)
    for vertices, share in paths:
        for edge in pairwise(vertices):
            loads[edge] += share
    busy = {edge: load / graph.edges[edge]["bandwidth"] for edge, load in loads.items()}
    longest = max(busy, key=busy.__getitem__)
    return Busiest(graph.edges[longest]["name"], 1.0 / busy[longest])


def groups_of(mesh: Mesh, axes: Sequence[int], num_stages: int) -> list[list[int]]:
    """The ranks of every group over the mesh axes of these numbers, jointly, in all stages."""
    sizes = [num_stages, *(axis.size for axis in mesh.axes)]
    ranks = np.arange(num_stages * mesh.size).reshape(sizes)
    inside = [1 + axis for axis in sorted(axes)]
    groups = np.moveaxis(ranks, inside, range(-len(inside), 0))
    found: list[list[int]] = groups.reshape(-1, prod(mesh.sizes[axis] for axis in axes)).tolist()
    return found


def axis_link(cluster: Cluster, mesh: Mesh, axes: Sequence[int], num_stages: int) -> Busiest:
    """The busiest link of rings over some mesh axes, in all stages at once. 0.1 s an axis of 16,384 devices."""
    graph = topology(cluster)
    return busiest_link(graph, (one for ranks in groups_of(mesh, axes, num_stages) for one in ring_paths(graph, ranks)))


def send_link(cluster: Cluster, mesh: Mesh, sender: int, receiver: int) -> Busiest:
    """The busiest link of the sends of all ranks of one stage to those of another."""
    graph, first, other = topology(cluster), sender * mesh.size, receiver * mesh.size
    return busiest_link(graph, ((path(graph, first + rank, other + rank), 1.0) for rank in range(mesh.size)))
