"""Seconds that a block takes longer because its backward recomputes something."""

from __future__ import annotations

from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.device import Device

# What Python and torch's hooks take on a CPU, in launches of a kernel of 3 us, for a block and for each of its ops:
# once in the forward, which notes what is kept, and once in the recomputation, which is given it. Measured within steps
# of a second, on blocks that recompute nearly nothing: 0.8 to 1.7 ms in the recomputation of 6 to 28 ops, and about as
# much forward. Where all data stay in the caches it is a fifth of that. On GPUs it is taken to hide behind kernels.
_BLOCK_LAUNCHES, _OP_LAUNCHES = 220, 15


def bookkeeping_time(num_ops: float, device: Device) -> OpTime:
    """Seconds to note and to look up what a block of so many ops keeps. Of experts each kernel is one."""
    if not device.is_cpu:
        return ZERO
    seconds = (_BLOCK_LAUNCHES + _OP_LAUNCHES * num_ops) * device.kernel_launch_s
    return OpTime(seconds, seconds)


def rematerialised_s(remat: str, forward_s: float, contraction_s: float, recomputed_s: float = 0.0) -> float:
    """Seconds of the ops of a block that run again in its backward, at rematerialisation level ``remat``.

    forward_s: of the whole block, communication included; contraction_s: the part of it in contractions, reductions and
    all-to-alls, which level selective keeps; recomputed_s: of every second matrix product, for level alternate.
    """
    if remat == "full":
        return forward_s
    if remat == "none":
        return 0.0
    return max(0.0, forward_s - contraction_s) + (recomputed_s if remat == "alternate" else 0.0)
