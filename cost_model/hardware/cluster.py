"""Clusters: equal devices on equal nodes, and which of them a mesh axis joins.

What a group of ranks puts on the links of a cluster is said by its graph (``topology``); here is the closed form.

Nodes may stand in pods whose switches pass on less than their NICs send. A ring that takes node after node leaves a
pod as often as it enters it, once for each of its channels. A pod of g GPUs holds g / (k r) such rings of r ranks on
each of k of its nodes, with r channels each, and lets g / o of its NICs' bandwidth out; so a ring gets min(1, k / o).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.cost_model.hardware.device import Device, Link
from autopar.cost_model.hardware.failure_rates import OBSERVED, STORAGE_PER_GPU, Reliability
from autopar.ir.errors import InvalidCluster
from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate with each other, seen from the topology.

    size: number of ranks. num_nodes: nodes they are on. ranks_per_node: on the node with the fewest of them.
    stride: distance of neighbours in global rank order. num_pods: pods they are on, if the cluster has any.
    nodes_per_pod: nodes of theirs in the pod with the fewest.
    """

    size: int
    num_nodes: int
    ranks_per_node: int
    stride: int
    num_pods: int = 1
    nodes_per_pod: int = 1

    @property
    def spans_nodes(self) -> bool:
        """Whether the group has ranks on several nodes."""
        return self.num_nodes > 1

    def __str__(self) -> str:
        return f"{self.size} ranks" + (f" on {self.num_nodes} nodes" if self.spans_nodes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Nodes behind common switches, numbered pod by pod.

    num_nodes: of each pod. oversubscription: what all NICs of a pod send, over what can leave it.
    """

    num_nodes: int
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``num_gpus`` equal devices, ``gpus_per_node`` on each node, ranks numbered node by node.

    pods: None if the network lets every node send to every other as fast as its NICs do. shares_nodes_of: devices that
    a node has, where it is assumed to give ``gpus_per_node`` of them; None if nothing was assumed. reliability: how
    often its parts fail. storage: bytes/s of checkpoints written or read by all of it; None if that is not known.
    spare_nodes: beyond these; None where as many can be had as are worth it.
    """

    device: Device
    num_gpus: int
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    pods: Pods | None = None
    shares_nodes_of: int | None = None
    reliability: Reliability = OBSERVED
    storage: float | None = None
    spare_nodes: int | None = None

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
        """Number of nodes, the last one perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def storage_bandwidth(self) -> float:
        """Bytes a second of checkpoints that all ranks write or read together."""
        return STORAGE_PER_GPU.value * self.num_gpus if self.storage is None else self.storage

    def group(self, mesh: Mesh, axes: int | Sequence[int]) -> Group:
        """The ranks of a stage mesh that differ along ``axes`` (positions), over all of them jointly.

        Of the several such groups, the one with the most nodes and the fewest ranks per node.
        """
        positions = (axes,) if isinstance(axes, int) else tuple(sorted(axes))
        return _group(self.gpus_per_node, self._pod_nodes, max(1, self.num_gpus // mesh.size), mesh, positions)

    def stage_link(self, mesh: Mesh, num_stages: int) -> Link:
        """The slowest link between neighbouring pipeline stages."""
        links = [self.send_link(mesh, stage, stage + 1) for stage in range(num_stages - 1)]
        return min(links, key=lambda link: link.ring_bandwidth(2), default=self.intra_node)

    def send_link(self, mesh: Mesh, sender: int, receiver: int) -> Link:
        """The slowest link from rank r of one stage to rank r of another, all r at once."""
        leaving = _most_leaving(self.gpus_per_node, mesh.size, sender, receiver)
        if not leaving:
            return self.intra_node
        link = self.inter_node.among(leaving, self.gpus_per_node)
        if self.pods is None:
            return link
        in_pod = self.gpus_per_node * self.pods.num_nodes
        share = _most_leaving(in_pod, mesh.size, sender, receiver) / in_pod
        return link.slower(max(1.0, self.pods.oversubscription * share))

    def group_over_stages(self, mesh: Mesh, holders: Sequence[int]) -> Group:
        """The ranks at one place in each of the stages ``holders``; if those differ, on most nodes."""
        nodes = [Counter((stage * mesh.size + r) // self.gpus_per_node for stage in holders) for r in range(mesh.size)]
        return _seen(max(nodes, key=lambda count: _badness(count, self._pod_nodes)), self._pod_nodes, mesh.size)

    def share_between_pods(self, group: Group) -> float:
        """Share of the bandwidth of its NICs that a ring of a group has between pods."""
        if self.pods is None or group.num_pods == 1:
            return 1.0
        return min(1.0, group.nodes_per_pod / self.pods.oversubscription)

    @property
    def _pod_nodes(self) -> int:
        return self.num_nodes if self.pods is None else self.pods.num_nodes

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The cluster with another device memory, nothing of it reserved."""
        return replace(self, device=replace(self.device, memory_bytes=memory_bytes, reserved_bytes=0))

    def with_network(self, speed: float) -> Cluster:
        """The cluster with links that, inside nodes and between them, carry ``speed`` times as much."""
        return replace(self, intra_node=self.intra_node.slower(1 / speed), inter_node=self.inter_node.slower(1 / speed))


def _badness(count: Counter[int], pod_nodes: int) -> tuple[int, int, int, int]:
    """Orders ranks by where they are: on more nodes and with fewer on each, the same of pods. count: of each node."""
    pods = Counter(node // pod_nodes for node in count)
    return len(count), -min(count.values()), len(pods), -min(pods.values())


def _seen(count: Counter[int], pod_nodes: int, stride: int) -> Group:
    num_nodes, ranks_per_node, num_pods, nodes_per_pod = _badness(count, pod_nodes)
    return Group(
        size=count.total(),
        num_nodes=num_nodes,
        ranks_per_node=-ranks_per_node,
        stride=stride,
        num_pods=num_pods,
        nodes_per_pod=-nodes_per_pod,
    )


@lru_cache(maxsize=4096)
def _group(gpus_per_node: int, pod_nodes: int, num_stages: int, mesh: Mesh, axes: tuple[int, ...]) -> Group:
    """O(ranks of a stage) at worst: groups that begin at the same place of a node, or of a pod, are alike."""
    strides = [1] * len(mesh)
    for position in range(len(mesh) - 2, -1, -1):
        strides[position] = strides[position + 1] * mesh.axes[position + 1].size
    offsets = [range(0, axis.size * stride, stride) for axis, stride in zip(mesh.axes, strides, strict=True)]
    in_pod = gpus_per_node * pod_nodes
    period = gpus_per_node if num_stages * mesh.size <= in_pod else in_pod
    starts = {stage * mesh.size % period for stage in range(num_stages)}
    for a, own in enumerate(offsets):
        if a not in axes:
            starts = {(start + offset) % period for start in starts for offset in own}
    members = np.zeros(1, dtype=np.int64)
    for a in axes:
        members = (members[:, None] + np.array(offsets[a])).reshape(-1)
    counts = [Counter(((start + members) // gpus_per_node).tolist()) for start in sorted(starts)]
    worst = max(counts, key=lambda count: _badness(count, pod_nodes))
    stride = min((strides[a] for a in axes if mesh.axes[a].size > 1), default=1)
    return _seen(worst, pod_nodes, stride)


@lru_cache(maxsize=1 << 14)
def _most_leaving(gpus_per_node: int, size: int, sender: int, receiver: int) -> int:
    """Ranks of one node, at most, whose stage is ``sender`` and whose partner in stage ``receiver`` is on another."""
    # Whole nodes are alike.
    ranks = range(min(size, 2 * gpus_per_node) if size % gpus_per_node == 0 else size)
    nodes = [((sender * size + rank) // gpus_per_node, (receiver * size + rank) // gpus_per_node) for rank in ranks]
    return max(Counter(source for source, target in nodes if source != target).values(), default=0)
