"""Every collective by size on every mesh axis that the machine can have, as models here issue them.

All groups of an axis communicate at once, as in training: ranks that share a network card share it here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.cost_model.cluster import Cluster
from autopar.ir.communicate import concatenate_ranks, exchange_pieces, sum_and_scatter, sum_ranks
from autopar.ir.mesh import Mesh
from autopar.profiling.clock import Clock
from autopar.profiling.samples import KINDS, Communicated, Samples

# Payloads in bytes, up to the one that takes so many times the seconds of a measurement.
_SIZES = tuple(1 << power for power in range(12, 33, 2))
_LONGEST = 10


def measure_links(samples: Samples, clock: Clock, cluster: Cluster, progress: Callable[[str], object]) -> None:
    """Adds to ``samples`` the times of every collective. cluster: says which ranks share a node."""
    for mesh, axis in axes_of(cluster):
        sizes = [a.size for a in mesh.axes]
        device_mesh = init_device_mesh(clock.device.type, tuple(sizes), mesh_dim_names=mesh.names)
        group = device_mesh.get_group(mesh.names[axis])
        found = cluster.group(mesh, axis)
        for kind in KINDS:
            for payload in _SIZES:
                progress(f"{kind} over {found}, {payload >> 10:,} KiB")
                run = _call(kind, payload, group, clock.device)
                seconds = clock.time(run)
                samples.communicated.append(Communicated(kind, found, payload, seconds))
                if seconds * 4 > _LONGEST * clock.seconds:
                    break


def axes_of(cluster: Cluster) -> Iterator[tuple[Mesh, int]]:
    """Meshes over all ranks, and the axis of each to measure: inside nodes, one rank of each node, and all ranks."""
    count, local = cluster.num_gpus, min(cluster.num_gpus, cluster.gpus_per_node)
    for size in range(2, local + 1):
        if local % size == 0:
            yield Mesh.of(others=count // size, axis=size), 1
    if count > local:
        if local > 1:
            yield Mesh.of(axis=count // local, others=local), 0
        yield Mesh.of(others=1, axis=count), 1


def _call(kind: str, payload: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """One collective of ``payload`` bytes; rounded down to what the group can share evenly."""
    name, size = str(group.group_name), group.size()
    piece = max(1, payload // 4 // size)
    whole = torch.ones(size, piece, device=device)
    if kind == "all_reduce":
        return lambda: sum_ranks(whole, name)
    if kind == "all_gather":
        return lambda: concatenate_ranks(whole[:1], 0, name)
    if kind == "reduce_scatter":
        return lambda: sum_and_scatter(whole, 0, name)
    if kind == "all_to_all":
        return lambda: exchange_pieces(whole, 0, 0, name)
    return _sends(whole.view(-1), group)


def _sends(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """The first half of the group sends to the second, as neighbouring pipeline stages do."""
    ranks = dist.get_process_group_ranks(group)
    half, place = len(ranks) // 2, dist.get_rank(group)

    def run() -> None:
        if place < half:
            dist.send(x, ranks[place + half], group=group)
        elif place < 2 * half:
            dist.recv(x, ranks[place - half], group=group)

    return run
