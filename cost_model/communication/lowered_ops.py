"""Communication inside ops that are sharded along a lowered factor.

A lowering computes on shards what its op cannot compute from shards alone; the collectives it needs are its
own and no redistribution shows them.

    cross_entropy, classes    all_gather of two float32 a token forward: logarithm of the sum, and the target's logit;
                              of three with label smoothing
    batch_norm                all_reduce of two float32 statistics a channel forward, and of two backward
    moe, dispatch             all_gather of the experts' counts and two all_to_alls of a token's row for each of its
                              experts forward, with a local reordering each; two all_to_alls backward
    moe, tokens               with a capacity, all_gather of the experts' counts forward
    moe, experts alone        none: each rank keeps the rows of its own
    embedding, embedding_bag  none: the result is a partial sum; the shard needs its offset only
    attention                 none; in zigzag layout its blocks are merged (``ring_attention``)
    bias, mean, random        none: a division, or a seed
    ring                      keys and values from rank to rank, as far as compute does not hide it (``ring_attention``)
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import fx

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.communication.ring_attention import in_blocks, ring_time
from autopar.cost_model.compute.expert_imbalance import Loads, share_of_busiest
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.compute.traffic import compute_itemsize
from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.shards import arguments
from autopar.ir.redistribution import Collective
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.rules.moe import EXPERTS

_FLOAT32 = 4
_INT64 = 8
_SILENT = frozenset({"attention", "bias", "embedding", "embedding_bag", "mean", "random"})


def lowering_time(
    node: fx.Node,
    rule: FactorRule,
    assignment: Assignment,
    fabric: Fabric,
    *,
    precision: str = "fp32",
    batch_factor: str | None = None,
    num_microbatches: int = 1,
    balanced: bool = False,
    compute: OpTime | None = None,
    loads: Loads = (),
) -> OpTime:
    """Seconds of the collectives inside ``node`` for one microbatch.

    precision: of compute. balanced: sequences are in zigzag layout where that balances causal attention.
    compute: what collectives inside may hide behind. loads: tokens per expert, by layer; equal if not known.
    """
    if in_blocks(node, rule, assignment, fabric.mesh, balanced=balanced):
        return ring_time(
            node,
            rule,
            assignment,
            fabric,
            compute or OpTime(),
            precision=precision,
            balanced=balanced,
            batch_factor=batch_factor,
            num_microbatches=num_microbatches,
        )

    def local(tensor: TensorFactors, numel: int) -> float:
        """Bytes of a float32 for each element that one rank holds."""
        names = {factor for dim in tensor for factor in dim}
        left = float(_FLOAT32 * numel)
        for other, axis in zip(assignment, fabric.mesh.axes, strict=True):
            if not names.isdisjoint(factors_of_choice(other)):
                left /= axis.size
        return left / num_microbatches if batch_factor in names else left

    operands = tensor_operands(node)
    total = OpTime()
    for number, choice in enumerate(assignment):
        name = rule.lowered.get(choice) if choice is not None else None
        if choice is None or name is None or name in _SILENT or fabric.mesh.axes[number].size == 1:
            continue
        if name == "cross_entropy":
            numbers = 3 if arguments(node)["label_smoothing"] else 2
            payload = numbers * local(rule.operands[1], operands[1].meta["val"].numel()) * fabric.mesh.axes[number].size
            total += OpTime(fabric.time(Collective.ALL_GATHER, payload, number))
        elif name == "moe":
            x = operands[0].meta["val"]
            factor: Any = node.kwargs.get("capacity_factor")
            counts = _INT64 * rule.sizes[EXPERTS] * fabric.mesh.axes[number].size
            gathered = OpTime(fabric.time(Collective.ALL_GATHER, counts, number))
            if factor is not None and not set(rule.results[0][0]).isdisjoint(factors_of_choice(choice)):
                total += gathered
            if choice in rule.joint:
                rows = local(rule.operands[1], operands[1].meta["val"].numel()) / _FLOAT32
                rows *= min(1.0, factor or 1.0) / _degree(EXPERTS, assignment, fabric)
                sharing = prod(
                    axis.size
                    for own, axis in zip(assignment, fabric.mesh.axes, strict=True)
                    if EXPERTS in factors_of_choice(own)
                )
                rows *= share_of_busiest(loads, rule.sizes[EXPERTS], sharing)
                payload = rows * x.shape[-1] * compute_itemsize(x.dtype, precision)
                total += gathered + _dispatch_time(payload, number, fabric)
        else:
            assert name == "batch_norm", f"no cost for lowering {name!r}"
            channels = operands[0].meta["val"].shape[1]
            seconds = fabric.time(Collective.ALL_REDUCE, 2 * _FLOAT32 * channels, number)
            total += OpTime(seconds, seconds)
    return total


def _degree(choice: str, assignment: Assignment, fabric: Fabric) -> int:
    """Number of ranks along the axes with exactly this choice."""
    return prod(axis.size for own, axis in zip(assignment, fabric.mesh.axes, strict=True) if own == choice)


def _dispatch_time(payload_bytes: float, axis: int, fabric: Fabric) -> OpTime:
    """Rows of ``payload_bytes`` to their experts and back along one axis: two all_to_alls and two reorderings a way."""
    device = fabric.cluster.device
    reorder = device.kernel_launch_s + device.memory_seconds(2 * payload_bytes)
    way = 2 * (fabric.time(Collective.ALL_TO_ALL, payload_bytes, axis) + reorder)
    return OpTime(way, way)
