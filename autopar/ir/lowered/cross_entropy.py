"""Cross entropy with the classes split. Logits are never gathered.

    cross_entropy(logits, target, reduction='mean')                     logits (..., c), target (...)
    cross_entropy(logits, target, reduction='mean', vocab_groups=('tp',))

Split classes: the loss of a token is log(sum exp(logits)) - logits[target]. Each rank contributes the
logarithm of its sum and, if it has the target's class, its logit; one all_gather of these two numbers a token
completes the loss (Megatron-LM, 3 all_reduces).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.inside import Inside, LocalSizes
from autopar.ir.lowered.shards import Groups, arguments, axes_with, factors_of, shard_count, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.primitives.collectives import apply
from autopar.ir.primitives.group_communication import group_all_gather_stacked
from autopar.ir.rule import Assignment, FactorRule

_REDUCTIONS = ("none", "mean", "sum")


class _SplitClasses(torch.autograd.Function):
    """Loss of each token, 0 where ignored. Backward recomputes the softmax from the logits: nothing else is kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, groups: Groups
    ) -> Tensor:
        local_classes = logits.shape[-1]
        num_classes = local_classes * shard_count(groups)
        valid = target != ignore_index
        local = target - shard_index(groups) * local_classes
        inside = valid & (local >= 0) & (local < local_classes)
        local = local.masked_fill(~inside, 0).unsqueeze(-1)
        parts = [logits.logsumexp(-1), logits.gather(-1, local).squeeze(-1).masked_fill(~inside, 0)]
        if label_smoothing:
            parts.append(logits.sum(-1))
        numbers = torch.stack(parts)
        for group in reversed(groups):
            ranks = group_all_gather_stacked(numbers, group)
            numbers = torch.cat([ranks[:, :1].logsumexp(0), ranks[:, 1:].sum(0)])
        log_sum, picked = numbers[0], numbers[1]
        loss = log_sum - picked
        if label_smoothing:
            loss = (1 - label_smoothing) * loss + label_smoothing * (log_sum - numbers[2] / num_classes)
        ctx.save_for_backward(logits, log_sum, local, inside, valid)
        ctx.label_smoothing, ctx.num_classes = label_smoothing, num_classes
        return loss.masked_fill(~valid, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, log_sum, local, inside, valid = ctx.saved_tensors
        grad = grad.masked_fill(~valid, 0).unsqueeze(-1)
        result = (logits - log_sum.unsqueeze(-1)).exp_().mul_(grad)
        result.scatter_add_(-1, local, grad.masked_fill(~inside.unsqueeze(-1), 0) * (ctx.label_smoothing - 1))
        if ctx.label_smoothing:
            result.sub_(grad * (ctx.label_smoothing / ctx.num_classes))
        return result, None, None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: composite.Reduction = "mean",
    vocab_groups: Groups = (),
) -> Tensor:
    """``composite.cross_entropy`` of a piece of the classes, over ``vocab_groups``.

    logits: (..., local c), widened to float32 if narrower. target: (...), global class numbers. Result: equal on
    all ranks of ``vocab_groups``.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = cast(Tensor, apply(_SplitClasses, logits, target, ignore_index, label_smoothing, vocab_groups))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def class_dim_cross_entropy(scores: Tensor, target: Tensor, **options: Any) -> Tensor:
    """``cross_entropy`` with the classes where ATen has them: dimension 1, or 0 of a vector."""
    return cross_entropy(scores.movedim(min(1, scores.dim() - 1), -1), target, **options)


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces a cross entropy with its classes split."""
    call = arguments(node)
    groups = _axes_of_classes(rule, assignment, mesh)
    kwargs = {key: call[key] for key in ("ignore_index", "label_smoothing", "reduction")}
    if node.target is composite.cross_entropy:
        return cross_entropy, (call["logits"], call["target"]), {**kwargs, "vocab_groups": groups}
    kwargs["reduction"] = _REDUCTIONS[call["reduction"]]
    return class_dim_cross_entropy, (call["self"], call["target"]), {**kwargs, "vocab_groups": groups}


def _axes_of_classes(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> Groups:
    return axes_with(factors_of(rule.operands[0]) - factors_of(rule.operands[1]), assignment, mesh)


def inside(node: fx.Node, rule: FactorRule, sizes: LocalSizes) -> Iterator[Inside]:
    """The numbers of every token, in at least float32, along each axis of the classes, the minor one first."""
    logits, target = (operand.meta["val"] for operand in tensor_operands(node)[:2])
    numbers = 3 if arguments(node)["label_smoothing"] else 2
    payload = numbers * max(4, logits.dtype.itemsize) * target.numel() * sizes.share(rule.operands[1])
    for axis in reversed(_axes_of_classes(rule, sizes.assignment, sizes.mesh)):
        yield Inside("all_gather", "forward", axis, payload * sizes.size(axis))
