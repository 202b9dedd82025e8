"""Cross entropy with the classes split, the tokens split, or both. Logits are never gathered.

    cross_entropy(logits, target, reduction='mean')                     logits (..., c), target (...)
    cross_entropy(logits, target, reduction='mean', vocab_groups=('tp',), token_groups=('dp',))

Split classes: the loss of a token is log(sum exp(logits)) - logits[target]. Each rank contributes the
logarithm of its sum and, if it has the target's class, its logit; one all_gather of these two numbers a token
completes the loss (Megatron-LM, 3 all_reduces). Split tokens: a mean divides by the global number of targets
that count, so that the ranks' losses are summands.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.ir import ops
from autopar.ir.collectives import apply
from autopar.ir.communicate import stack_ranks, sum_ranks
from autopar.ir.lowered.shards import Groups, arguments, axes_with, factors_of, shard_count, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule

_REDUCTIONS = ("none", "mean", "sum")
_SUM = _REDUCTIONS.index("sum")


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
            ranks = stack_ranks(numbers, group)
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
    reduction: ops.Reduction = "mean",
    vocab_groups: Groups = (),
    token_groups: Groups = (),
) -> Tensor:
    """``ops.cross_entropy`` of pieces: of the classes over ``vocab_groups``, of the tokens over ``token_groups``.

    logits: (local ..., local c), widened to float32 if narrower. target: (local ...), global class numbers.
    Result: equal on all ranks of ``vocab_groups``; a summand over ``token_groups`` unless reduction is "none".
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if vocab_groups:
        losses = cast(Tensor, apply(_SplitClasses, logits, target, ignore_index, label_smoothing, vocab_groups))
        if reduction == "none":
            return losses
        total = losses.sum()
    else:
        kind: ops.Reduction = "none" if reduction == "none" else "sum"
        total = ops.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=kind
        )
    if reduction != "mean":
        return total
    return total / _global_sum((target != ignore_index).sum(), token_groups)


def class_loss(
    op: torch._ops.OpOverload,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    *args: Any,
    groups: Groups,
) -> Tensor:
    """The mean of ATen's ``nll_loss`` or ``cross_entropy_loss`` over tokens split over ``groups``, as a summand.

    scores: (local n, c, ...), classes whole. target: (local n, ...). weight: (c,) or None. args: what follows
    ``ignore_index``.
    """
    total = op(scores, target, weight, _SUM, ignore_index, *args)
    valid = target != ignore_index
    if weight is None:
        counted = valid.sum()
    else:
        counted = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum()
    return cast(Tensor, total / _global_sum(counted, groups))


def class_dim_cross_entropy(scores: Tensor, target: Tensor, **options: Any) -> Tensor:
    """``cross_entropy`` with the classes where ATen has them: dimension 1, or 0 of a vector."""
    return cross_entropy(scores.movedim(min(1, scores.dim() - 1), -1), target, **options)


def _global_sum(count: Tensor, groups: Groups) -> Tensor:
    for group in groups:
        count = sum_ranks(count, group)
    return count


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces a cross entropy or negative log likelihood."""
    call = arguments(node)
    tokens = axes_with(set(rule.summed), assignment, mesh)
    classes = axes_with(factors_of(rule.operands[0]) - factors_of(rule.operands[1]), assignment, mesh)
    if node.target is ops.cross_entropy:
        operands = (call["logits"], call["target"])
        kwargs = {key: call[key] for key in ("ignore_index", "label_smoothing", "reduction")}
        return cross_entropy, operands, {**kwargs, "vocab_groups": classes, "token_groups": tokens}
    if classes:
        kwargs = {key: call[key] for key in ("ignore_index", "label_smoothing")}
        kwargs |= {"reduction": _REDUCTIONS[call["reduction"]], "vocab_groups": classes, "token_groups": tokens}
        return class_dim_cross_entropy, (call["self"], call["target"]), kwargs
    names = ("self", "target", "weight", "ignore_index", "label_smoothing")
    return class_loss, (node.target, *(call[name] for name in names if name in call)), {"groups": tokens}
