"""Copies of activations to host memory and back, beside what a device computes.

    forward     a block computes for f seconds; what the block before it keeps is copied to the host meanwhile
    backward    it computes for b seconds; what that block kept is copied back

Offloaded parameters and their gradients use the same link for g seconds, so a copy of c seconds is hidden by f - g and
adds

    max(0, c - max(0, f - g))

and likewise backward. Both directions of the link are counted as one. A copy needs no core of the device, but the
bandwidth of its memory, which is then not there for kernels: that counts in full. On a CPU nothing runs beside compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.communication.gradient_sync import SyncTime
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """What one block has in host memory of a microbatch.

    num_bytes: of it; input_bytes of them are inputs of the block. added: seconds that the copies add to a forward and
    a backward.
    """

    num_bytes: float = 0.0
    input_bytes: float = 0.0
    added: OpTime = ZERO


def added_by_copies(num_bytes: float, device: Device, computed: OpTime, taken: OpTime = ZERO) -> OpTime:
    """Seconds that copies of ``num_bytes`` add to a forward and a backward of a block. computed: seconds that the block
    computes. taken: in which others use the link."""
    if not num_bytes:
        return ZERO
    copy = device.host.copy_seconds(num_bytes)
    if device.is_cpu:
        return OpTime(copy, copy)
    through_memory = device.memory_seconds(num_bytes)
    return OpTime(
        *(through_memory + max(0.0, copy - max(0.0, own - other)) for own, other in zip(computed, taken, strict=True))
    )


def hidden_bytes(device: Device, computed: OpTime, taken: OpTime = ZERO) -> float:
    """The most bytes whose copies are hidden, both ways."""
    if device.is_cpu:
        return 0.0
    room = min(max(0.0, own - other) for own, other in zip(computed, taken, strict=True))
    return room / device.host.copy_seconds(1.0)


def link_seconds(offloaded: SyncTime, num_microbatches: int) -> OpTime:
    """Seconds a microbatch, on average of a step, in which the copies of ``offload_time`` take the link."""
    after = offloaded.step_s - offloaded.first_s
    return OpTime(
        offloaded.forward_s + offloaded.first_s / num_microbatches, offloaded.backward_s + after / num_microbatches
    )
