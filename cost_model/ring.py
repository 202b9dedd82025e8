"""Communication of a ring attention that its compute does not hide, and the merging of its blocks.

On N ranks one step computes an N-th of the local work while the next piece of keys and values comes in:

    forward     sum over hops   max(0, send(k, v) - o step)                             + N merges
    backward    sum over hops   max(0, send(k, v) + send(dk, dv) - o step)  +  home     + N merges

o is the share of a transfer's time that compute beside it hides, all of it where links do not say (``Link.overlap``).
Gradients travel in float32. Hops along an outer axis are fewer than along the inner one
(``autopar.ir.sequence.hops``). All ranks wait for the slowest: the step is the one of the rank with most work.
"""

from __future__ import annotations

import operator
from collections import Counter
from math import prod

from torch import fx

from autopar.cost_model.collectives import Fabric, point_to_point_time
from autopar.cost_model.ops import compute_itemsize
from autopar.cost_model.seconds import OpTime
from autopar.ir.graph import tensor_operands, tensor_results
from autopar.ir.lowered.attention import QUERIES, lengths_of, sight_of
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.sequence import RingShape, folds_for, hops_needed

_FLOAT32 = 4

# Kernels that put one block's result into the sum: log-sum-exp, two exponentials, multiply, add.
_MERGE_LAUNCHES = 6

# What a ring takes on a CPU besides, in launches of a kernel, forward and backward: once, for a hop, and for a block.
# With tiny blocks 112 and 175 were measured on a ring of two with one block, 120 and 182 with two; on a ring of four
# 205 and 330 with one, 285 and 390 with four. A GPU has its kernels queued meanwhile.
_RING_LAUNCHES, _HOP_LAUNCHES, _BLOCK_LAUNCHES = (40, 75), (47, 77), (19, 16)


def ring_time(
    node: fx.Node,
    rule: FactorRule,
    assignment: Assignment,
    fabric: Fabric,
    compute: OpTime,
    *,
    precision: str,
    balanced: bool,
    batch_factor: str | None,
    num_microbatches: int,
) -> OpTime:
    """Seconds that a ring adds to one microbatch of an attention whose blocks take ``compute``."""
    mesh = fabric.mesh
    cuts_queries = [axis for axis, choice in enumerate(assignment) if QUERIES in factors_of_choice(choice)]
    ring = [axis for axis in cuts_queries if assignment[axis] in rule.joint]
    sizes = tuple(mesh.axes[axis].size for axis in cuts_queries)
    lengths = lengths_of(rule)
    shape = RingShape(
        sight_of(node),
        lengths,
        folds_for(lengths, prod(sizes), balanced=balanced),
        sizes,
        tuple(axis in ring for axis in cuts_queries),
    )
    taken = Counter(hops_needed(shape))

    def local(factors: TensorFactors, numel: int) -> float:
        """Elements of a microbatch on one rank."""
        names = {factor for dim in factors for factor in dim}
        cut = prod(
            axis.size
            for choice, axis in zip(assignment, mesh.axes, strict=True)
            if not names.isdisjoint(factors_of_choice(choice))
        )
        return numel / cut / (num_microbatches if batch_factor in names else 1)

    operands = tensor_operands(node)
    sent = sum(local(rule.operands[p], operands[p].meta["val"].numel()) for p in (1, 2))
    itemsize = compute_itemsize(operands[1].meta["val"].dtype, precision)
    results = sum(local(f, r.numel()) for f, r in zip(rule.results, tensor_results(node), strict=True))
    device, steps = fabric.cluster.device, taken.total() + 1
    # Forward a block's result is scaled, the sum scaled and added to; backward gradients are added to float32 sums.
    launches = _MERGE_LAUNCHES * device.kernel_launch_s
    merge = device.memory_seconds(results * (6 * _FLOAT32 + itemsize)) + launches
    added = results * (2 * _FLOAT32 + itemsize) + sent * (6 * _FLOAT32 + itemsize)
    merge_back = device.memory_seconds(added) + launches
    forward, backward = steps * merge, steps * merge_back
    if device.is_cpu:
        counts = 1, taken.total(), steps
        host, host_back = (
            device.kernel_launch_s * sum(map(operator.mul, counts, own))
            for own in zip(_RING_LAUNCHES, _HOP_LAUNCHES, _BLOCK_LAUNCHES, strict=True)
        )
        forward, backward = forward + host, backward + host_back
    for number, axis in enumerate(ring):
        keys, grads = (_send_s(fabric, axis, sent * size) for size in (itemsize, _FLOAT32))
        hidden = fabric.link((axis,)).overlap / steps
        forward += taken[number] * (device.jitter_s + max(0.0, keys - hidden * compute.forward_s))
        backward += taken[number] * (device.jitter_s + max(0.0, keys + grads - hidden * compute.backward_s))
        if taken[number] % mesh.axes[axis].size:
            backward += grads
    return OpTime(forward, backward)


def _send_s(fabric: Fabric, axis: int, num_bytes: float) -> float:
    """To the next rank of the group along ``axis``, over its slowest link."""
    cluster = fabric.cluster
    return point_to_point_time(num_bytes, cluster.inter_node if fabric.group(axis).spans_nodes else cluster.intra_node)
