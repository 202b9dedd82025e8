"""Where a plan keeps what ZeRO shards: on the device if that fits, else in host memory, else on a local disk.

Each is far slower than the one before, so that it is for what fits no other way, unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_model.hardware.device import Device
from autopar.ir.errors import InfeasiblePlan, InvalidCluster
from autopar.ir.offload import Offload
from autopar.search.outer.configuration import Candidate

_GIB = float(1 << 30)


def offloads(pinned: Offload | None, device: Device) -> tuple[Offload, ...]:
    """Places to try, the fastest first. Raises InvalidCluster for a disk that the device has not."""
    if pinned is Offload.DISK and device.disk is None:
        raise InvalidCluster(
            f"the cluster file says nothing of a disk of {device.name}, on which state is to be kept.\n"
            "  try: disk: {read_gb_s: 5, write_gb_s: 3, capacity_gb: 3000}, of one device's share; or autopar profile "
            "--disk FOLDER, which measures it"
        )
    if pinned is not None:
        return (Offload(pinned),)
    found = [Offload.NONE]
    if not device.is_cpu:
        found.append(Offload.HOST)
    if device.disk is not None:
        found.append(Offload.DISK)
    return tuple(found)


def has_room(found: Candidate) -> bool:
    """Whether what a plan offloads fits where it is, activations in host memory included."""
    device = found.pricing.ops.cluster.device
    host, disk = _taken(found)
    room = 0.0 if device.disk is None else device.disk.capacity
    return disk <= room and (device.is_cpu or host <= device.host.memory_bytes)


def _taken(found: Candidate) -> tuple[float, float]:
    """Bytes in host memory and on disk."""
    host, disk = found.predicted.offloaded()
    return host + max(found.predicted.host_bytes), disk


def no_room(found: Candidate) -> InfeasiblePlan:
    """The error for a plan that offloads more than there is room for."""
    device = found.pricing.ops.cluster.device
    host, disk = (size / _GIB for size in _taken(found))
    room = 0.0 if device.disk is None else device.disk.capacity / _GIB
    return InfeasiblePlan(
        f"what fits offloads {host:.1f} GiB a rank to host memory, of which there are "
        f"{device.host.memory_bytes / _GIB:.1f} GiB, and {disk:.1f} GiB to disk, of which there are {room:.1f} GiB.\n"
        "  try: more devices; or disk: in the cluster file"
    )


def least_on_disk(found: Candidate, fits: Callable[[Candidate], bool], evaluate: Callable[..., Candidate]) -> Candidate:
    """The plan with the fewest blocks of each stage on disk, the others in host memory. fits: on the device. evaluate:
    gives the plan with other stages."""
    for number, stage in enumerate(found.stages):
        low, high = 0, stage.on_disk
        while low < high:
            count = (low + high) // 2
            own = replace(stage, on_disk=count)
            other = evaluate(found, (*found.stages[:number], own, *found.stages[number + 1 :]))
            if fits(other) and has_room(other):
                found, high = other, count
            else:
                low = count + 1
    return found
