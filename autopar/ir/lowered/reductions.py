"""Ops that are right on local shards but for one division.

mean.dim(x, [1])          over a dimension in pieces of equal size:
local_mean(mean.dim, x, [1], groups=('tp',))      each rank's mean / N, a summand

linear(x, w, b)           with the input features in pieces:
split_bias(linear, x, w, b, bias=2, groups=('tp',))      each rank adds b / N; the result is a summand
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, fx

from autopar.ir.lowered.shards import Groups, arguments, axes_lowered, shard_count
from autopar.ir.mesh import Mesh
from autopar.ir.ops.composite import columns_linear
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.torch_private import OpOverload, schema_of


def local_mean(op: OpOverload, *args: Any, groups: Groups, **kwargs: Any) -> Tensor:
    """``op(*args, **kwargs)``, a mean over the local piece, as a summand of the mean over all pieces."""
    return cast(Tensor, op(*args, **kwargs) / shard_count(groups))


def split_bias(op: OpOverload, *args: Any, bias: int, groups: Groups, **kwargs: Any) -> Tensor:
    """``op`` with the operand at position ``bias`` divided by the number of shards.

    Summed over ``groups`` it counts once. Its gradient is divided too, so that it is a summand as well: every
    rank sees the whole gradient of the result.
    """
    return cast(Tensor, op(*args[:bias], args[bias] / shard_count(groups), *args[bias + 1 :], **kwargs))


def columns_split_bias(x: Tensor, matrix: Tensor, bias: Tensor, *, groups: Groups) -> Tensor:
    """``split_bias`` of ``columns_linear``: a graph can hold an OpOverload as an argument, but no function."""
    return columns_linear(x, matrix, bias / shard_count(groups))


def build_mean(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces a mean over sharded dimensions."""
    groups = axes_lowered("mean", rule, assignment, mesh)
    return local_mean, (node.target, *node.args), {**node.kwargs, "groups": groups}


def build_bias(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces a linear, convolution or addmm with its summed factor sharded."""
    groups = axes_lowered("bias", rule, assignment, mesh)
    call = arguments(node)
    if node.target is columns_linear:
        return columns_split_bias, (call["input"], call["weight"], call["bias"]), {"groups": groups}
    assert isinstance(node.target, OpOverload)
    positional = [a.name for a in schema_of(node.target).arguments if not a.kwarg_only]
    bias = positional.index("bias") if "bias" in positional else 0
    args = tuple(call.pop(name) for name in positional)
    if args[bias] is None:
        return node.target, node.args, dict(node.kwargs)
    # Only keyword-only arguments are left, such as addmm's beta.
    return split_bias, (node.target, *args), {**call, "bias": bias, "groups": groups}
