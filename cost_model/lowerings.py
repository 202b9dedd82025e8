"""Communication inside ops that are sharded along a lowered factor.

A lowering computes on shards what its op cannot compute from shards alone; the collectives it needs are its
own and no redistribution shows them.

    cross_entropy, classes    three all_reduces of one float32 a token forward: maximum, sum, target's logit
    cross_entropy, tokens     one all_reduce of the number of counted targets forward
    batch_norm                all_reduce of two float32 statistics a channel forward, and of two backward
    embedding, attention      none: the result is a partial sum; the shard needs its offset only
"""

from __future__ import annotations

from torch import fx

from autopar.cost_model.collectives import Fabric
from autopar.cost_model.seconds import OpTime
from autopar.ir.graph import tensor_operands, tensor_results
from autopar.ir.redistribution import Collective
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice

_FLOAT32 = 4
_SILENT = frozenset({"embedding", "attention"})


def lowering_time(
    node: fx.Node,
    rule: FactorRule,
    assignment: Assignment,
    fabric: Fabric,
    *,
    batch_factor: str | None = None,
    num_microbatches: int = 1,
) -> OpTime:
    """Seconds of the collectives inside ``node`` for one microbatch.

    An unknown lowering costs an all_reduce of its results each way.
    """

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
            tokens = rule.operands[1]
            if any(choice in dim for dim in tokens):
                total += OpTime(fabric.time(Collective.ALL_REDUCE, _FLOAT32, number))
            else:
                payload = local(tokens, operands[1].meta["val"].numel())
                total += 3 * OpTime(fabric.time(Collective.ALL_REDUCE, payload, number))
        elif name == "batch_norm":
            channels = operands[0].meta["val"].shape[1]
            seconds = fabric.time(Collective.ALL_REDUCE, 2 * _FLOAT32 * channels, number)
            total += OpTime(seconds, seconds)
        else:
            payload = sum(local(f, r.numel()) for f, r in zip(rule.results, tensor_results(node), strict=True))
            seconds = fabric.time(Collective.ALL_REDUCE, payload, number)
            total += OpTime(seconds, seconds)
    return total
