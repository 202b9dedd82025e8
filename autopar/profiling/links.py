"""Every collective by size on every mesh axis that the machine can have, as models here and FSDP issue them.

All groups of an axis communicate at once, as in training: ranks that share a network card share it here too. On a CPU
there is a little compute before each, as in training too. Sends between nodes are also measured with one rank of each
node sending, as between pipeline stages of one rank. Last come an all-reduce beside compute, and small ones between
computations, where ranks wait for the slowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.cost_model.hardware.cluster import Cluster, Group
from autopar.ir.mesh import Mesh
from autopar.ir.primitives.group_communication import (
    group_all_gather,
    group_all_reduce,
    group_all_to_all,
    group_reduce_scatter,
)
from autopar.profiling.clock import Clock
from autopar.profiling.samples import KINDS, Communicated, Overlapped, Samples, Waited

# Payloads in bytes, up to the one that takes so many times the seconds of a measurement. On a CPU what is larger than
# any bucket or block is bound by the page faults of new memory.
_SIZES = tuple(1 << power for power in range(12, 33, 2))
_LARGEST_ON_CPU = 1 << 24
_LONGEST = 20

# Rows, columns and depth of the product that an all-reduce runs beside, and what that takes of the product's seconds.
_GPU_PRODUCT, _CPU_PRODUCT = 4096, 256
_BESIDE = 0.6

# Seconds of compute before each of so many small all-reduces. Of four ranks that shared two cores the slowest was late
# by 0.9 ms after 1 ms, 1.4 after 6, 4.2 after 14, 4.5 after 29 and 5.2 after 57.
_BETWEEN_S, _WAITS = 16e-3, 6

# Of what is compared: each has so many turns. Waits are a small difference of large times.
_ROUNDS, _WAIT_ROUNDS = 5, 10

# Part of the seconds of a measurement that calls with compute before them take in each turn.
_APART = 0.3


def measure_links(samples: Samples, clock: Clock, cluster: Cluster, progress: Callable[[str], object]) -> None:
    """Adds to ``samples`` the times of every collective. cluster: says which ranks share a node."""
    for mesh, axis in axes_of(cluster):
        sizes = [a.size for a in mesh.axes]
        device_mesh = init_device_mesh(clock.device.type, tuple(sizes), mesh_dim_names=mesh.names)
        group = device_mesh.get_group(mesh.names[axis])
        found = cluster.group(mesh, axis)
        single = found.spans_nodes and found.ranks_per_node == 1 and found.size < cluster.num_gpus
        for kind, alone in [*((kind, False) for kind in KINDS), *([("send", True)] if single else [])]:
            for payload in _SIZES:
                if clock.device.type == "cpu" and payload > _LARGEST_ON_CPU:
                    break
                progress(f"{kind} over {found}, {payload >> 10:,} KiB")
                run = _call(kind, payload, group, clock.device)
                if alone and dist.get_rank() % cluster.gpus_per_node:
                    run = _nothing
                seconds = clock.time(run) if clock.device.type == "cuda" else _after_compute(clock, run)
                samples.communicated.append(Communicated(kind, found, payload, seconds, alone))
                if seconds * 4 > _LONGEST * clock.seconds:
                    break
        samples.overlapped.append(_beside_compute(samples, clock, found, group, progress))
        samples.waited.append(_between_compute(clock, found, group, progress))


def _nothing() -> None:
    """What a rank does that only waits for the others."""


def _product(device: torch.device) -> Callable[[], object]:
    """The compute that collectives are measured beside and between."""
    size = _GPU_PRODUCT if device.type == "cuda" else _CPU_PRODUCT
    a = torch.randn(size, size, device=device)
    return lambda: torch.mm(a, a)


def _turns(number: int, *parts: Callable[[], object]) -> None:
    for _ in range(number):
        for part in parts:
            part()


def _after_compute(clock: Clock, run: Callable[[], object]) -> float:
    """Seconds that one call of ``run`` adds to a little compute before it.

    With nothing between them calls of gloo run into each other, where a rank goes on with the next one as soon as it
    has what the last one gives it: all-to-alls of 64 KiB to 1 MiB over four ranks took 2.2 to 2.7 ms, and 2.9 to 3.6
    between the passes of a layer; all-gathers and reduce-scatters alike, all-reduces hardly more.
    """
    compute = _product(clock.device)
    ((likely,),) = clock.rounds(run, number=1)
    count = max(1, min(clock.most_repeats, round(_APART * clock.seconds / likely)))
    rounds = clock.rounds(partial(_turns, count, compute), partial(_turns, count, compute, run), number=_ROUNDS)
    return max(likely / 10, median(both - computing for computing, both in rounds) / count)


def _beside_compute(
    samples: Samples, clock: Clock, found: Group, group: dist.ProcessGroup, progress: Callable[[str], object]
) -> Overlapped:
    """An all-reduce that takes about as long as a measurement, beside products that take a little longer."""
    progress(f"all_reduce over {found} beside matrix products")
    sums = [one for one in samples.communicated if one.kind == "all_reduce" and one.group == found]
    likely = min(sums, key=lambda one: abs(one.seconds - clock.seconds))
    x = torch.ones(likely.payload_bytes // 4, device=clock.device)
    product = _product(clock.device)

    def sum_all() -> dist.Work:
        return cast(dist.Work, dist.all_reduce(x, group=group, async_op=True))

    def both(count: int) -> None:
        work = sum_all()
        _turns(count, product)
        work.wait()

    def sum_alone() -> None:
        sum_all().wait()

    count = max(1, round(clock.time(sum_alone) / _BESIDE / clock.time(product)))
    runs = sum_alone, partial(_turns, count, product), partial(both, count)
    return Overlapped(found, *clock.in_turn(*runs, rounds=_ROUNDS))


def _between_compute(clock: Clock, found: Group, group: dist.ProcessGroup, progress: Callable[[str], object]) -> Waited:
    """Compute and a small all-reduce in turn, against each of them by itself."""
    progress(f"all_reduce over {found} between matrix products")
    x, name = torch.ones(1, device=clock.device), str(group.group_name)
    product = _product(clock.device)
    compute = partial(_turns, max(1, round(_BETWEEN_S / clock.time(product))), product)

    def summed() -> object:
        return group_all_reduce(x, name)

    runs = (partial(_turns, _WAITS, *parts) for parts in ((summed,), (compute,), (compute, summed)))
    rounds = [[seconds / _WAITS for seconds in times] for times in clock.rounds(*runs, number=_WAIT_ROUNDS)]
    # What is added is a difference of times that drift: the median of those of a round each.
    return Waited(
        found,
        compute_s=median(computing for _, computing, _ in rounds),
        added_s=median(both - computing for _, computing, both in rounds),
        alone_s=median(alone for alone, _, _ in rounds),
    )


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
        return lambda: group_all_reduce(whole, name)
    if kind == "all_gather":
        return lambda: group_all_gather(whole[:1], 0, name)
    if kind == "reduce_scatter":
        return lambda: group_reduce_scatter(whole, 0, name)
    if kind == "all_to_all":
        return lambda: group_all_to_all(whole, 0, 0, name)
    if kind == "zero_gather":
        own = whole[0].clone()
        return lambda: dist.all_gather_into_tensor(torch.empty_like(whole).view(-1), own, group)
    if kind == "zero_scatter":
        return lambda: dist.reduce_scatter_tensor(torch.empty_like(whole[0]), whole.view(-1), group=group)
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
