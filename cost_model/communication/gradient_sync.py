"""Costs of a step besides its ops: gradient synchronisation, gathered parameters, the optimiser.

Per data-parallel group of ``n`` parameter elements a rank, with ``c`` bytes of compute:

    ZeRO    each microbatch                                        once a step
    0       -                                                      all_reduce 4n
    1       -                                                      reduce_scatter 4n, all_gather cn
    2       reduce_scatter 4n                                      all_gather cn
    3       all_gather cn (forward), all_gather cn and             -
            reduce_scatter 4n (backward)

A weight that is gathered in 8 bits counts as n in place of cn. A stack that adds gradients up in 16 bits reduces 2n in
place of 4n. So ZeRO-3 moves 1.5 times the bytes of ZeRO-0 in float32. Without resharding after forward it gathers once.

Offload adds, for the 4n/d bytes that a rank has of parameters or gradients, a copy to the device with each gather and
one to the host with each scatter, and runs AdamW at the bandwidth of host memory. What is on disk is read before each
gather; gradients are written after each scatter, and read before it where others are there; and of AdamW 16n/d bytes
are read and 12n/d written. All of it is ahead of its use or behind it, block by block.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.hardware.device import ITEMSIZE, Device
from autopar.ir.offload import Offload
from autopar.ir.redistribution import Collective

_MASTER = 4

# Share of the compute beside it that a prefetched or bucketed collective can hide under: the first and last buckets and
# the waits between blocks stay exposed. Chosen. A step of Llama 3 8B on 64 H100 takes 0.02 % less with 0.9 and 0.03 %
# more with 0.6, one of Mixtral 8x7B on 32 as long (docs/decisions/0021).
OVERLAP = 0.8

# Cost on a CPU of starting the W pass of a split backward at one op with weights, in launches of a kernel: 14 to
# 35 were measured on layers alone, 59 to 82 in stages of a pipeline of four ranks on two cores, where that pass
# finds nothing in the caches any more. A GPU has its kernels queued meanwhile.
_BRANCH_LAUNCHES = 60

# What FSDP's Python takes on a CPU, in launches of a kernel, for a block and for each of its tensors: around each of
# its passes, to gather it and to scatter its gradients. Measured over a fake process group, on blocks of 2 to 16 small
# tensors: 24 to 40 and 17 to 32 around, 44 to 80 to gather, 30 to 100 to scatter. A GPU has its kernels queued
# meanwhile.
_PASS_LAUNCHES, _GATHER_LAUNCHES, _SCATTER_LAUNCHES = (20.0, 1.0), (42.0, 2.5), (27.0, 4.0)

# An element of fused AdamW: parameter, gradient and two moments are read, all but the gradient written, in float32.
ADAMW_READ, ADAMW_WRITTEN = 16, 12
ADAMW_BYTES = ADAMW_READ + ADAMW_WRITTEN


@dataclass(frozen=True, slots=True)
class SyncTime:
    """Seconds of data-parallel communication, before any overlap: per microbatch, and once a step.

    regather_s: the part of ``backward_s`` that the backward waits for; first_s: the part of ``step_s`` that the first
    forward does. The rest of both comes after the backward.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    regather_s: float = 0.0
    first_s: float = 0.0

    def __add__(self, other: SyncTime) -> SyncTime:
        return SyncTime(*map(operator.add, _parts(self), _parts(other)))

    def __mul__(self, factor: float) -> SyncTime:
        return SyncTime(*(part * factor for part in _parts(self)))

    __rmul__ = __mul__

    def total_s(self, num_microbatches: int) -> float:
        """Seconds of a step of ``num_microbatches``, before any overlap."""
        return (self.forward_s + self.backward_s) * num_microbatches + self.step_s


_parts = operator.attrgetter(*(field.name for field in fields(SyncTime)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSync:
    """Synchronisation of some parameters, before any overlap: what can run beside compute, what compute loses if all of
    that does, and what it waits for."""

    beside: SyncTime = SyncTime()
    lost: SyncTime = SyncTime()
    waited: SyncTime = SyncTime()

    def __add__(self, other: BucketSync) -> BucketSync:
        return BucketSync(
            beside=self.beside + other.beside, lost=self.lost + other.lost, waited=self.waited + other.waited
        )


def sync_time(
    fabric: Fabric,
    numel: float,
    axes: int | Sequence[int],
    *,
    zero: int = 0,
    precision: str = "fp32",
    num_collectives: int = 1,
    reshard: bool = True,
    trained: float = 1.0,
    gathered: float | None = None,
) -> SyncTime:
    """Seconds of gradient synchronisation of ``numel`` parameter elements of a rank over mesh ``axes`` (jointly).

    trained: share of them that has a gradient to scatter; ZeRO-3 gathers the others too. gathered: bytes of them as
    they are gathered, if not as they are computed with.
    num_collectives: buckets or blocks the elements come in, each with its latency. Ranks do not wait for each other
    at a bucket that is reduced beside compute, only at the step's end, which every plan has.
    """
    if not isinstance(axes, int) and not axes:
        return SyncTime()
    count = max(1, num_collectives)
    width = fabric.cluster.device.stack.memory.gradient_bytes(precision)
    gradient, copy = width * numel / count, (ITEMSIZE[precision] * numel if gathered is None else gathered) / count
    if zero == 0:
        once = fabric.time(Collective.ALL_REDUCE, gradient, axes) - fabric.cluster.device.jitter_s
        return SyncTime(step_s=count * once)
    scatter = (
        count * fabric.time(Collective.REDUCE_SCATTER, gradient * trained, axes, "zero_scatter") if trained else 0.0
    )
    gather = count * fabric.time(Collective.ALL_GATHER, copy, axes, "zero_gather")
    return _when(zero, gather, scatter, reshard=reshard)


def without_latency(time: Callable[[float], SyncTime]) -> SyncTime:
    """What is in proportion to the elements in ``time``, of a synchronisation of so many times as many."""
    return time(2.0) + -1.0 * time(1.0)


def _when(zero: int, gather_s: float, scatter_s: float, *, reshard: bool) -> SyncTime:
    """When parameters are gathered and gradients scattered."""
    if zero == 1:
        return SyncTime(step_s=scatter_s + gather_s, first_s=gather_s)
    if zero == 2:
        return SyncTime(backward_s=scatter_s, step_s=gather_s, first_s=gather_s)
    regather_s = gather_s if reshard else 0.0
    return SyncTime(forward_s=gather_s, backward_s=regather_s + scatter_s, regather_s=regather_s)


def hooks_time(num_tensors: int, device: Device, *, zero: int, reshard: bool = True) -> SyncTime:
    """Seconds that FSDP's Python adds for a block of ``num_tensors`` on a CPU, where nothing hides it."""
    if not device.is_cpu:
        return SyncTime()
    around, gather, scatter = (
        device.kernel_launch_s * (block + num_tensors * tensor)
        for block, tensor in (_PASS_LAUNCHES, _GATHER_LAUNCHES, _SCATTER_LAUNCHES)
    )
    return SyncTime(forward_s=around, backward_s=around) + _when(zero, gather, scatter, reshard=reshard)


def branch_s(device: Device) -> float:
    """Seconds that a split backward adds for an op with weights, on a CPU."""
    return _BRANCH_LAUNCHES * device.kernel_launch_s if device.is_cpu else 0.0


def buffer_copies(
    numel: float, *, zero: int, itemsize: int, gathered: int, num_microbatches: int, reshard: bool = True
) -> tuple[float, float]:
    """Bytes that FSDP moves in device memory for its buffers: in forward and backward, a microbatch on average.

    Gathered parameters, of ``gathered`` bytes an element, are copied out of a buffer, gradients are copied into one to
    be reduce-scattered.
    """
    out, into = 2 * gathered * numel, (itemsize + _MASTER) * numel
    if zero == 1:
        return out / num_microbatches, into / num_microbatches
    if zero == 2:
        return out / num_microbatches, into
    return out, into + (out if reshard else 0.0)


def master_work(
    numel: float, shards: int, *, zero: int, itemsize: int, num_microbatches: int, in_products: bool = False
) -> tuple[float, float]:
    """Bytes moved for float32 parameters and gradients: in forward and backward, a microbatch on average.

    Parameters are cast for compute once a step, under ZeRO-3 in every microbatch, the ``shards``-th part of them. Where
    gradients are kept unsharded, those of the first microbatch are cast back and later ones are added as they come;
    under ZeRO-2 and 3 they are added after their reduce-scatter. in_products: products add what they make to unsharded
    float32 gradients (``Stack.adds_in_products``), which are set to zero once a step.
    """
    cast = (_MASTER + itemsize) * numel if itemsize != _MASTER else 0.0
    forward = cast / shards if zero == 3 else cast / shards / num_microbatches
    num_accumulated = num_microbatches - 1
    if zero >= 2:
        return forward, 3 * _MASTER * numel / shards * num_accumulated / num_microbatches
    if in_products and num_accumulated:
        return forward, _MASTER * numel / num_microbatches
    first = cast if num_accumulated or not zero else 0.0
    return forward, (first + (itemsize + 2 * _MASTER) * numel * num_accumulated) / num_microbatches


def narrow_work(
    numel: float, shards: int, *, zero: int, itemsize: int, num_microbatches: int, reshard: bool = True
) -> tuple[float, float]:
    """Bytes moved, beside ``master_work``, for parameters that are gathered in 8 bits, of the part of them that a rank
    has: it looks for the largest magnitude once a step, and quantises before each gather."""
    looked, quantised = _MASTER * numel / shards / num_microbatches, (itemsize + 1) * numel / shards
    if zero < 3:
        return looked + quantised / num_microbatches, 0.0
    return looked + quantised, quantised if reshard else 0.0


def offload_time(
    shard_numel: float,
    device: Device,
    *,
    zero: int,
    reshard: bool = True,
    trained: float = 1.0,
    offload: Offload = Offload.HOST,
    num_microbatches: int = 1,
) -> SyncTime:
    """Copies between the device and where the ``shard_numel`` elements are that a rank has of offloaded parameters.

    trained: share of them that has a gradient.
    """
    size = _MASTER * shard_numel
    copy = 0.0 if device.is_cpu else device.host.copy_seconds(size)
    gather, scatter = copy, trained * copy
    if offload is Offload.DISK:
        assert device.disk is not None, "of a device with a disk"
        accumulated = 0.0 if zero == 1 else (num_microbatches - 1) / num_microbatches
        gather = max(gather, device.disk.seconds(size, 0.0))
        scatter = max(scatter, device.disk.seconds(accumulated * trained * size, trained * size))
    return _when(zero, gather, scatter, reshard=reshard)


def exposed_time(communication_s: float, compute_s: float, lost_s: float, overlap: float = OVERLAP) -> float:
    """Seconds that communication adds to ``compute_s`` seconds of work it may run beside.

    lost_s: by which all of it, if hidden, slows the compute down, which then has more time to hide it.
    """
    if not communication_s:
        return 0.0
    hidden = min(communication_s, most_hidden_s(compute_s, lost_s / communication_s, overlap))
    return communication_s - hidden + lost_s / communication_s * hidden


def most_hidden_s(compute_s: float, lost: float, overlap: float = OVERLAP) -> float:
    """Seconds of communication that can run beside ``compute_s`` seconds of work. lost: of each of them."""
    return overlap * compute_s / (1.0 - lost)


def optimizer_time(numel: float, device: Device, *, offload: Offload = Offload.NONE) -> float:
    """Seconds of a fused AdamW step over ``numel`` float32 elements: bound by memory, of the host if offloaded, or by
    the disk."""
    if offload:
        seconds = device.host.memory_seconds(ADAMW_BYTES * numel)
        if offload is Offload.DISK:
            assert device.disk is not None, "of a device with a disk"
            seconds = max(seconds, device.disk.seconds(ADAMW_READ * numel, ADAMW_WRITTEN * numel))
        return seconds
    return device.kernel_launch_s + device.optimizer_seconds(ADAMW_BYTES * numel)
