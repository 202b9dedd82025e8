"""Batch norm in training with the batch split: statistics over all pieces, forward and backward.

    _native_batch_norm_legit_functional(x, w, b, running_mean, running_var, True, momentum, eps)
    batch_norm(x, w, b, running_mean, running_var, momentum, eps, groups=('dp',))

Pieces have equal size, so the mean is the mean of the pieces' means, and the variance the mean of their
variances plus the variance of their means (Chan, Golub and LeVeque 1979): no difference of large sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.errors import UnsupportedOp
from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.inside import Inside, LocalSizes
from autopar.ir.lowered.shards import Groups, arguments, axes_lowered, shard_count
from autopar.ir.mesh import Mesh
from autopar.ir.primitives.collectives import apply, communicates_backward
from autopar.ir.primitives.group_communication import group_all_gather_stacked, group_all_reduce
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.torch_private import BATCH_NORM_OF_BATCH, BATCH_NORM_WITH_STATISTICS

_aten = torch.ops.aten


def _statistics(x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel (dimension 1) over all pieces."""
    dims = [0, *range(2, x.dim())]
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    var, mean = torch.var_mean(wide, dims, correction=0)
    both = torch.stack([mean, var])
    for group in reversed(groups):
        pieces = group_all_gather_stacked(both, group)
        spread, mean = torch.var_mean(pieces[:, 0], 0, correction=0)
        both = torch.stack([mean, pieces[:, 1].mean(0) + spread])
    return both[0], both[1]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: Groups
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var = _statistics(x, groups)
        # With statistics given, ATen's kernel is an elementwise one.
        out = _aten.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.has_bias, ctx.eps, ctx.groups = bias is not None, eps, groups
        if groups:
            communicates_backward(ctx)
        ctx.mark_non_differentiable(mean, inverse, var)
        return out, mean, inverse, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        # The kernel's weight and bias gradients are the two sums that the others need: grad * normalised x, grad.
        scale = weight if weight is not None else torch.ones_like(mean)
        _, grad_weight, grad_bias = _aten.native_batch_norm_backward(
            grad, x, scale, None, None, mean, inverse, True, ctx.eps, [False, True, True]
        )
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_weight, grad_bias]).to(mean.dtype)
            for group in ctx.groups:
                sums = group_all_reduce(sums, group)
            count = x.numel() // x.shape[1] * shard_count(ctx.groups)
            along_x, along_one = (sums / count).unbind()
            # grad_x = scale * inverse * (grad - along_one - normalised * along_x), as a * grad + b * x + c.
            a = scale.to(mean.dtype) * inverse
            b = -a * inverse * along_x
            c = -a * along_one - b * mean
            shape = [1, -1] + [1] * (x.dim() - 2)
            a, b, c = (v.to(x.dtype).view(shape) for v in (a, b, c))
            grad_x = torch.addcmul(torch.addcmul(c, grad, a), x, b)
        return (
            grad_x,
            grad_weight if weight is not None else None,
            grad_bias if ctx.has_bias else None,
            None,
            None,
        )


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    *,
    groups: Groups,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Batch norm over the batch of which each rank of ``groups`` has an equal piece.

    x: (local n, c, ...). The others: (c,). Results: normalised x, mean, 1 / sqrt(var + eps) and, if there are
    running statistics, their new values (unbiased variance), all but the first equal on all ranks. The weight's
    and bias's gradients are summands over ``groups``.
    """
    out, mean, inverse, var = apply(_BatchNorm, x, weight, bias, eps, groups)
    if running_mean is None or running_var is None:
        return out, mean, inverse
    count = x.numel() // x.shape[1] * shard_count(groups)
    unbiased = var * (count / (count - 1))
    new_mean = running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum
    new_var = running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum
    return out, mean, inverse, new_mean, new_var


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces a functional batch norm in training; its results keep their numbers."""
    call = arguments(node)
    if not call["training"]:
        return node.target, node.args, dict(node.kwargs)
    if node.target not in (BATCH_NORM_WITH_STATISTICS, BATCH_NORM_OF_BATCH):
        raise UnsupportedOp(
            f"{node.name} ({node.meta.get('source', 'no source line')}): {node.target} updates its statistics in place "
            "or reserves a workspace; only functional batch norms can have their batch split.\n"
            "  try: capture the model with autopar.ir.capture.capture, which makes it functional"
        )
    groups = axes_lowered("batch_norm", rule, assignment, mesh)
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return batch_norm, tuple(call.get(name) for name in names), {"groups": groups}


def inside(node: fx.Node, rule: FactorRule, sizes: LocalSizes) -> Iterator[Inside]:
    """Mean and variance of every channel forward, in at least float32; the sums of two gradients backward."""
    if not arguments(node)["training"]:
        return
    x = tensor_operands(node)[0].meta["val"]
    payload = 2 * max(4, x.dtype.itemsize) * x.shape[1] * sizes.share((rule.operands[0][1],))
    groups = axes_lowered("batch_norm", rule, sizes.assignment, sizes.mesh)
    for axis in reversed(groups):
        yield Inside("all_gather", "forward", (axis,), payload * sizes.size(axis))
    if sizes.flows(0):
        for axis in groups:
            yield Inside("all_reduce", "backward", (axis,), payload)
