"""Time of collectives.

A collective on ``n`` ranks moves per rank, of a tensor of ``S`` bytes:

    all_reduce        2 (n - 1) / n  S         S: the tensor, the same size on every rank
    all_gather          (n - 1) / n  S         S: the gathered tensor
    reduce_scatter      (n - 1) / n  S         S: the tensor before it is scattered
    all_to_all          (n - 1) / n  S         S: the local shard

Rings run at the speed of their slowest edge. Inside a node that is the device's link. Where a group crosses
nodes, NCCL cuts the ring into one channel per NIC, so a group with ``r`` ranks on each node has ``r`` NICs and
gets ``min(link, r * nic)``; the measured busbw of 4-node groups (192 of 200 GB/s on DGX A100, 382 of 400 on
B200) agrees. In an all-to-all each rank has one NIC for what leaves its node; where several rows of a token go to one
node, a stack may send it there once (``sent_once``). Between pods of nodes there may be less
(``cluster.py``); of an all-to-all what leaves the pod of its rank shares what can leave a pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, prod

from autopar.cost_model.hardware.cluster import Cluster, Group
from autopar.cost_model.hardware.device import Device, Link
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Shard
from autopar.ir.redistribution import Collective

# NCCL takes the switch's own reduction from this group size on (NVIDIA/nccl#1455).
_SWITCH_REDUCE_FROM = 5

# How much longer kernels take beside a collective, for its bus bandwidth as a share of that of a GPU's memory. It moves
# two to three times its bytes in memory and has a multiprocessor for each 12 GB/s (NVIDIA/nccl#689, #1428). On A100
# beside an all-gather in a node, 235 of 2,039 GB/s, products take 1.76 times as long, attention 1.83, elementwise 2.5
# (NVIDIA/nccl#1428). On H100, 0.11 by this, products take 1.7 times (NVIDIA's developer forum, 337991), where they take
# all multiprocessors 2 (pytorch#143988). Passes of four GPUs that are beside one for a part of their time take 1.19
# times as long in the mean, at most 1.4 (arXiv 2507.03114).
_SLOWDOWN = 0.76 / (235 / 2039)

# The same where processes share the cores of a host: 1.126, Hetu-Galvatron overlap coefficient @cea12ffb.
_SLOWDOWN_ON_CPU = 0.126

# Of each second of a collective's latency, in which its kernels wait and keep their multiprocessors, and of copies to
# host memory or disk, as much is lost. Chosen.
LOST_IN_LATENCY = _SLOWDOWN_ON_CPU / (1.0 + _SLOWDOWN_ON_CPU)

# Bytes at which times that are affine in them are sampled.
_SAMPLE = 1e6


def volume_bytes(collective: Collective, payload_bytes: float, size: int) -> float:
    """Bytes that each of ``size`` ranks sends. ``payload_bytes`` as in the table above."""
    if not collective.communicates or size == 1:
        return 0.0
    share = (size - 1) / size * payload_bytes
    return 2 * share if collective is Collective.ALL_REDUCE else share


def sent_once(rows_per_token: float, num_nodes: int) -> float:
    """Of the bytes of rows that leave a node, what is left if a token travels once to each node that it has rows for.

    rows_per_token: that it sends, each to any of ``num_nodes`` nodes alike. Of ``n`` rows ``n (N - 1) / N`` leave the
    node, for ``(N - 1) (1 - (1 - 1 / N) ** n)`` nodes on average.
    """
    if num_nodes == 1 or rows_per_token <= 1.0:
        return 1.0
    reached: float = 1.0 - (1.0 - 1.0 / num_nodes) ** rows_per_token
    return min(1.0, reached * num_nodes / rows_per_token)


def collective_time(
    collective: Collective,
    payload_bytes: float,
    group: Group,
    cluster: Cluster,
    kind: str | None = None,
    leaving: float = 1.0,
) -> float:
    """Seconds of one collective. ``payload_bytes`` as in the table above. kind: its name in the link, if another.
    leaving: share of the bytes of an all-to-all for other nodes that has to be sent between nodes.

    Ranks wait for each other as long as after a millisecond of work, which is little; ``search.predict`` knows better.
    """
    moved = volume_bytes(collective, payload_bytes, group.size)
    if moved == 0.0:
        return 0.0
    intra, inter = cluster.intra_node, cluster.inter_node
    relative = (inter if group.spans_nodes else intra).relative(kind or collective.value)
    collective = issued_as(kind or collective.value, collective, cluster.device)
    if collective is Collective.ALL_TO_ALL and group.spans_nodes:
        outside = (group.size - group.ranks_per_node) / group.size * payload_bytes
        inside = (moved - outside) / intra.ring_bandwidth(group.ranks_per_node)
        inside += (1.0 - leaving) * outside / intra.ring_bandwidth(group.ranks_per_node)
        busy = max(inside, leaving * outside / inter.ring_bandwidth(2))
        if cluster.pods is not None and group.num_pods > 1:
            in_pod = group.ranks_per_node * group.nodes_per_pod
            away = (group.size - in_pod) / group.size * payload_bytes
            busy = max(busy, leaving * away * cluster.pods.oversubscription / inter.ring_bandwidth(2))
    else:
        busy = moved / _ring_bandwidth(collective, group, cluster)
    return cluster.device.jitter_s + _latency(collective, group, intra, inter) + relative * busy


def issued_as(kind: str, collective: Collective, device: Device) -> Collective:
    """The collective that moves the bytes of one of ``kind``, a ``collective``."""
    as_all_to_all = kind in (Collective.ALL_GATHER.value, Collective.REDUCE_SCATTER.value)
    return Collective.ALL_TO_ALL if as_all_to_all and device.is_cpu else collective


def _ring_bandwidth(collective: Collective, group: Group, cluster: Cluster) -> float:
    """Bus bandwidth of a group: bytes/s that each rank's share of the ring gets."""
    intra = cluster.intra_node
    if group.spans_nodes:
        network = cluster.inter_node.ring_bandwidth(2) * group.ranks_per_node * cluster.share_between_pods(group)
        if group.ranks_per_node == 1:
            return network
        return min(intra.ring_bandwidth(group.ranks_per_node), network)
    ring = intra.ring_bandwidth(group.size)
    if collective is Collective.ALL_REDUCE and intra.switch_reduce is not None and group.size >= _SWITCH_REDUCE_FROM:
        return max(ring, intra.switch_reduce * 2 * (group.size - 1) / group.size)
    return ring


def _latency(collective: Collective, group: Group, intra: Link, inter: Link) -> float:
    link = inter if group.spans_nodes else intra
    latency = link.base_latency_s + latency_rounds(collective, group, trees=link.trees) * link.hop_latency_s
    if group.spans_nodes and link.trees and collective is Collective.ALL_REDUCE:
        latency += 2 * (group.ranks_per_node - 1) * intra.hop_latency_s
    return latency


def latency_rounds(collective: Collective, group: Group, *, trees: bool = True) -> int:
    """Messages one after the other over the slowest link: the steps of a ring, or of a tree of nodes and back."""
    if group.spans_nodes and trees and collective is Collective.ALL_REDUCE:
        return 2 * ceil(log2(group.num_nodes))
    if group.spans_nodes and collective is Collective.ALL_TO_ALL:
        return group.num_nodes - 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (group.size - 1)


def slowdown_beside(bandwidth: float, device: Device) -> float:
    """How much longer kernels take beside communication of so many bytes/s: 0.76 is 1.76 times as long."""
    return _SLOWDOWN_ON_CPU if device.is_cpu else _SLOWDOWN * bandwidth / device.memory_bandwidth


def lost_beside(bandwidth: float, device: Device) -> float:
    """What compute loses of each second of such communication that runs beside it."""
    slowdown = slowdown_beside(bandwidth, device)
    return slowdown / (1.0 + slowdown)


def point_to_point_time(payload_bytes: float, link: Link) -> float:
    """Seconds to send ``payload_bytes`` from one rank to one other."""
    latency = link.base_latency_s + link.hop_latency_s
    return latency + link.relative("send") * payload_bytes / link.ring_bandwidth(2)


def time_over_stages(payload_bytes: float, mesh: Mesh, holders: Sequence[int], cluster: Cluster) -> float:
    """Seconds to sum ``payload_bytes`` of each rank over the pipeline stages ``holders``, while other stages wait."""
    group, per_node = cluster.group_over_stages(mesh, holders), cluster.gpus_per_node
    busy = Counter((stage * mesh.size + rank) // per_node for stage in holders for rank in range(mesh.size))
    shared = cluster.inter_node.among(max(busy.values()), per_node)
    return collective_time(Collective.ALL_REDUCE, payload_bytes, group, replace(cluster, inter_node=shared))


@dataclass(frozen=True)
class Fabric:
    """The links of one stage mesh on one cluster: what communication along its axes costs."""

    cluster: Cluster
    mesh: Mesh

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Group of each mesh axis."""
        return tuple(self.cluster.group(self.mesh, axis) for axis in range(len(self.mesh)))

    def group(self, axes: int | Sequence[int]) -> Group:
        """The group of ranks along one mesh axis or several."""
        return self.groups[axes] if isinstance(axes, int) else self.cluster.group(self.mesh, axes)

    def link(self, axes: int | Sequence[int]) -> Link:
        """The slowest link of the group over one axis, or over several jointly."""
        return self.cluster.inter_node if self.group(axes).spans_nodes else self.cluster.intra_node

    def time(
        self, collective: Collective, payload_bytes: float, axes: int | Sequence[int], kind: str | None = None
    ) -> float:
        """Seconds of one collective over one axis, or over several jointly."""
        return collective_time(collective, payload_bytes, self.group(axes), self.cluster, kind)

    def dispatch_time(self, payload_bytes: float, axes: Sequence[int], rows_per_token: float) -> float:
        """Seconds of an all-to-all of rows to experts or back, of which each token has so many, over all of ``axes``
        jointly."""
        group, cluster = self.group(axes), self.cluster
        leaving = sent_once(rows_per_token, group.num_nodes) if cluster.device.stack.sends_once else 1.0
        return collective_time(Collective.ALL_TO_ALL, payload_bytes, group, cluster, leaving=leaving)

    def overlap(self, axes: int | Sequence[int], zero: int) -> float:
        """Share of the synchronisation of gradients that can run beside compute. FSDP needs streams for that."""
        return float(not self.cluster.device.is_cpu) if zero else self.link(axes).overlap

    def lost(self, axes: int | Sequence[int]) -> float:
        """What compute loses of each second of a gather or reduction over ``axes`` that runs beside it."""
        bandwidth = _ring_bandwidth(Collective.ALL_GATHER, self.group(axes), self.cluster)
        return lost_beside(bandwidth, self.cluster.device)

    def rate(self, collective: Collective, axis: int) -> tuple[float, float]:
        """Seconds of a collective along an axis: fixed, and for each byte of its payload."""
        one, two = (self.time(collective, n * _SAMPLE, axis) for n in (1, 2))
        per_byte = (two - one) / _SAMPLE
        return max(0.0, one - per_byte * _SAMPLE), per_byte


def sharded_degree(layout: Layout, mesh: Mesh) -> int:
    """Into how many pieces ``layout`` cuts a tensor."""
    return prod(axis.size for placement, axis in zip(layout, mesh.axes, strict=True) if isinstance(placement, Shard))
