"""Cross entropy with the classes split. Logits are never gathered.

    cross_entropy(logits, target, reduction='mean')                     logits (..., c), target (...)
    cross_entropy(logits, target, reduction='mean', vocab_groups=('tp',))

Split classes: the loss of a token is log(sum exp(logits)) - logits[target]. Each rank contributes the
logarithm of its sum and, if it has the target's class, its logit; one all_gather of these two numbers a token
completes the loss (Megatron-LM, 3 all_reduces).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.inside import Inside, LocalSizes
from autopar.ir.lowered.loss_chunks import pair_of, rows_at_once
from autopar.ir.lowered.shards import Groups, arguments, axes_with, factors_of, shard_count, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.primitives.collectives import apply
from autopar.ir.primitives.group_communication import group_all_gather_stacked
from autopar.ir.rule import Assignment, FactorRule

_REDUCTIONS = ("none", "mean", "sum")


class TokenLosses(NamedTuple):
    """Of each token: its loss, 0 where ignored, and what the gradient of its logits is made of.

    log_sum: over all classes. local: its class among those of this rank, 0 where ``inside`` says that it has another.
    """

    loss: Tensor
    log_sum: Tensor
    local: Tensor
    inside: Tensor
    valid: Tensor


def token_losses(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, groups: Groups
) -> TokenLosses:
    """Losses of tokens whose classes are split over ``groups``. logits: (..., local c), target: (...)."""
    local_classes = logits.shape[-1]
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
        num_classes = local_classes * shard_count(groups)
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_sum - numbers[2] / num_classes)
    return TokenLosses(loss.masked_fill(~valid, 0), log_sum, local, inside, valid)


def gradient_of_logits(
    shifted: Tensor, of: TokenLosses, grad: Tensor | None, label_smoothing: float, groups: Groups
) -> Tensor:
    """``shifted``, which is the logits less ``log_sum``, becomes their gradient, in place. grad: of each loss, or 1."""
    weight = of.valid.to(shifted.dtype) if grad is None else grad.masked_fill(~of.valid, 0)
    weight = weight.unsqueeze(-1)
    result = shifted.exp_().mul_(weight)
    result.scatter_add_(-1, of.local, weight.masked_fill(~of.inside.unsqueeze(-1), 0) * (label_smoothing - 1))
    if label_smoothing:
        result.sub_(weight * (label_smoothing / (shifted.shape[-1] * shard_count(groups))))
    return result


class _SplitClasses(torch.autograd.Function):
    """Loss of each token, 0 where ignored. Backward recomputes the softmax from the logits: nothing else is kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, groups: Groups
    ) -> Tensor:
        found = token_losses(logits, target, ignore_index, label_smoothing, groups)
        ctx.save_for_backward(logits, *found[1:])
        ctx.label_smoothing, ctx.groups = label_smoothing, groups
        return found.loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, *others = ctx.saved_tensors
        found = TokenLosses(grad, *others)
        shifted = logits - found.log_sum.unsqueeze(-1)
        return gradient_of_logits(shifted, found, grad, ctx.label_smoothing, ctx.groups), None, None, None, None


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
    rows = target.numel() * sizes.share(rule.operands[1])
    axes = _axes_of_classes(rule, sizes.assignment, sizes.mesh)
    classes = logits.shape[-1] / prod(map(sizes.size, axes))
    at_once = rows_at_once(rows, classes) if pair_of(node) is not None else None
    for start in range(0, ceil(rows), at_once or ceil(rows)):
        payload = numbers * max(4, logits.dtype.itemsize) * min(at_once or rows, rows - start)
        for axis in reversed(axes):
            yield Inside("all_gather", "forward", (axis,), payload * sizes.size(axis), once=at_once is not None)
