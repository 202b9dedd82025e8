"""Clusters: equal devices on equal nodes, and which of them a mesh axis joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from autopar.cost_model.hardware import Device, Link
from autopar.ir.errors import InvalidCluster
from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate with each other, seen from the topology.

    size: number of ranks. num_nodes: nodes they are on. ranks_per_node: on the node with the fewest of them.
    stride: distance of neighbours in global rank order.
    """

    size: int
    num_nodes: int
    ranks_per_node: int
    stride: int

    @property
    def spans_nodes(self) -> bool:
        return self.num_nodes > 1

    def __str__(self) -> str:
        return f"{self.size} ranks" + (f" on {self.num_nodes} nodes" if self.spans_nodes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``num_gpus`` equal devices, ``gpus_per_node`` on each node, ranks numbered node by node."""

    device: Device
    num_gpus: int
    gpus_per_node: int
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.gpus_per_node < 1:
            raise InvalidCluster(
                f"a cluster needs at least one GPU and one GPU per node; got num_gpus={self.num_gpus}, "
                f"gpus_per_node={self.gpus_per_node}"
            )
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            raise InvalidCluster(
                f"{self.num_gpus} GPUs do not fill nodes of {self.gpus_per_node}; "
                f"try --gpus {self.num_gpus // self.gpus_per_node * self.gpus_per_node} or another --gpus-per-node"
            )

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    def group(self, mesh: Mesh, axes: int | Sequence[int]) -> Group:
        """The ranks of a stage mesh that differ along ``axes`` (positions), over all of them jointly.

        Of the several such groups, the one with the most nodes and the fewest ranks per node.
        """
        positions = (axes,) if isinstance(axes, int) else tuple(sorted(axes))
        return _group(self.gpus_per_node, max(1, self.num_gpus // mesh.size), mesh, positions)

    def stage_link(self, mesh: Mesh, num_stages: int) -> Link:
        """The slowest link between neighbouring pipeline stages."""
        links = [self.send_link(mesh, stage, stage + 1) for stage in range(num_stages - 1)]
        return min(links, key=lambda link: link.ring_bandwidth(2), default=self.intra_node)

    def send_link(self, mesh: Mesh, sender: int, receiver: int) -> Link:
        """The slowest link from rank r of one stage to rank r of another, all r at once."""
        leaving = _most_leaving(self.gpus_per_node, mesh.size, sender, receiver)
        return self.inter_node.among(leaving, self.gpus_per_node) if leaving else self.intra_node

    def group_over_stages(self, mesh: Mesh, holders: Sequence[int]) -> Group:
        """The ranks at one place in each of the stages ``holders``; if those differ, on most nodes."""
        nodes = [Counter((stage * mesh.size + r) // self.gpus_per_node for stage in holders) for r in range(mesh.size)]
        worst = max(nodes, key=lambda count: (len(count), -min(count.values())))
        return Group(size=len(holders), num_nodes=len(worst), ranks_per_node=min(worst.values()), stride=mesh.size)

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same cluster with another device memory, nothing of it reserved."""
        return replace(self, device=replace(self.device, memory_bytes=memory_bytes, reserved_bytes=0))

    @classmethod
    def from_yaml(cls, text: str, *, source: str = "cluster") -> Cluster:
        """A cluster from its YAML description; see ``description.ClusterDescription``."""
        from autopar.cost_model.description import cluster_from_yaml

        return cluster_from_yaml(text, source=source)

    @classmethod
    def from_dict(cls, data: object, *, source: str = "cluster") -> Cluster:
        """A cluster from the mapping that ``from_yaml`` reads."""
        from autopar.cost_model.description import cluster_from_dict

        return cluster_from_dict(data, source=source)


@lru_cache(maxsize=4096)
def _group(gpus_per_node: int, num_stages: int, mesh: Mesh, axes: tuple[int, ...]) -> Group:
    """O(ranks of the job) at worst; one stage is enough where stages and nodes nest."""
    strides = [1] * len(mesh)
    for position in range(len(mesh) - 2, -1, -1):
        strides[position] = strides[position + 1] * mesh.axes[position + 1].size
    inside = [range(0, mesh.axes[a].size * strides[a], strides[a]) for a in axes]
    outside = [
        range(0, axis.size * stride, stride)
        for a, (axis, stride) in enumerate(zip(mesh.axes, strides, strict=True))
        if a not in axes
    ]
    members = [sum(offsets) for offsets in product(*inside)]
    nested = mesh.size % gpus_per_node == 0 or gpus_per_node % mesh.size == 0
    worst: tuple[int, int] | None = None
    for stage in range(1 if nested else num_stages):
        for base in product(*outside):
            start = stage * mesh.size + sum(base)
            count = Counter((start + member) // gpus_per_node for member in members)
            found = (-len(count), min(count.values()))
            worst = found if worst is None or found < worst else worst
    assert worst is not None
    stride = min((strides[a] for a in axes if mesh.axes[a].size > 1), default=1)
    return Group(size=len(members), num_nodes=-worst[0], ranks_per_node=worst[1], stride=stride)


@lru_cache(maxsize=1 << 14)
def _most_leaving(gpus_per_node: int, size: int, sender: int, receiver: int) -> int:
    """Ranks of one node, at most, whose stage is ``sender`` and whose partner in stage ``receiver`` is on another."""
    # Whole nodes are alike.
    ranks = range(min(size, 2 * gpus_per_node) if size % gpus_per_node == 0 else size)
    nodes = [((sender * size + rank) // gpus_per_node, (receiver * size + rank) // gpus_per_node) for rank in ranks]
    return max(Counter(source for source, target in nodes if source != target).values(), default=0)
