"""Costs of attention in blocks beside its scores: a ring's communication, and the merging of blocks.

On N ranks one step computes an N-th of the local work while the next piece of keys and values comes in:

    forward     sum over hops   max(0, send(k, v) - o step)                             + merges
    backward    sum over hops   max(0, send(k, v) + send(dk, dv) - o step)  +  home     + merges

o is the share of a transfer's time that compute beside it hides, all of it where links do not say (``Link.overlap``).
Gradients travel in float32. Hops along an outer axis are fewer than along the inner one
(``autopar.ir.sequence.hops``). All ranks wait for the slowest: the step is the one of the rank with most work.

Queries that are cut in zigzag layout see their keys in blocks too where the keys are whole: one step, and no hop, after
the keys are put in natural order.
"""

from __future__ import annotations

import operator
from collections import Counter
from math import prod

from torch import fx

from autopar.cost_model.communication.collectives import Fabric, point_to_point_time
from autopar.cost_model.compute.op_time import OpTime
from autopar.ir.graph import tensor_operands, tensor_results
from autopar.ir.lowered.attention import QUERIES, lengths_of, sight_of
from autopar.ir.lowered.table import lowering_of
from autopar.ir.mesh import Mesh
from autopar.ir.precision import itemsize_of
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.sequence import RingShape, block_work, hops_needed, zigzag_ranks_for

_FLOAT32 = 4

# Kernels that put one block's result into the sum: log-sum-exp, two exponentials, multiply, add.
_MERGE_LAUNCHES = 6

# What all of it takes on a CPU, in launches of a kernel, forward and backward: once, for a hop and for a block.
# Measured with tiny blocks: no hop and two blocks 65 and 78, four blocks 62 to 77 and 81 to 103; a ring of two with two
# blocks 112 and 175, of four with four 205 and 330. A GPU has its kernels queued meanwhile.
_LAUNCHES_ON_CPU = (40.0, 47.0, 8.0), (60.0, 82.0, 9.0)


def in_blocks(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh, *, balanced: bool) -> bool:
    """Whether an attention is computed in blocks. balanced: causal sequences are in zigzag layout where they can be."""
    name = lowering_of(rule, assignment)
    if name != "attention" or not balanced or sight_of(node).kind not in ("causal", "sliding"):
        return name == "ring"
    return zigzag_ranks_for(lengths_of(rule), prod(_query_sizes(assignment, mesh)), balanced=True) > 1


def _query_sizes(assignment: Assignment, mesh: Mesh) -> tuple[int, ...]:
    pairs = zip(assignment, mesh.axes, strict=True)
    return tuple(axis.size for choice, axis in pairs if QUERIES in factors_of_choice(choice))


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
    """Seconds that blocks add to one microbatch of an attention whose scores take ``compute``."""
    mesh = fabric.mesh
    cuts_queries = [axis for axis, choice in enumerate(assignment) if QUERIES in factors_of_choice(choice)]
    ring = [axis for axis in cuts_queries if assignment[axis] in rule.joint]
    sizes, lengths = _query_sizes(assignment, mesh), lengths_of(rule)
    shape = RingShape(
        sight_of(node),
        lengths,
        zigzag_ranks_for(lengths, prod(sizes), balanced=balanced),
        sizes,
        tuple(axis in ring for axis in cuts_queries),
    )
    taken, work = Counter(hops_needed(shape)), block_work(shape)

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
    itemsize = itemsize_of(operands[1].meta["val"].dtype, precision)
    results = sum(local(f, r.numel()) for f, r in zip(rule.results, tensor_results(node), strict=True))
    device, steps = fabric.cluster.device, taken.total() + 1
    # Keys and values are packed to be sent, and put in order first where they are not. A block's result is scaled, the
    # sum scaled and added to; backward its gradients are added to float32 sums, which start as zeros and travel behind
    # the keys.
    copied = 2 * itemsize * sent * (bool(taken) + shape.reorders)
    merged = work.rows * results * (6 * _FLOAT32 + itemsize)
    added = work.rows * results * (2 * _FLOAT32 + itemsize) + work.columns * sent * (2 * _FLOAT32 + itemsize)
    added += sent * _FLOAT32 * (steps + 3 * taken.total())
    if device.is_cpu:
        # Its kernel is given heads of keys as many as of queries, and gives gradients of as many.
        heads = operands[0].meta["val"].shape[1] / operands[1].meta["val"].shape[1]
        if heads > 1:
            merged += work.columns * sent * itemsize * (1 + heads)
            added += work.columns * sent * itemsize * 2 * (1 + heads)
        counts = 1, taken.total(), work.number
        launches = [sum(map(operator.mul, counts, own)) for own in _LAUNCHES_ON_CPU]
    else:
        launches = [work.number * _MERGE_LAUNCHES] * 2
    forward, backward = (
        device.memory_seconds(copied + moved) + count * device.kernel_launch_s
        for moved, count in zip((merged, added), launches, strict=True)
    )
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
