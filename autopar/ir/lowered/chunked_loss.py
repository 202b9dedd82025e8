"""A last linear layer and its cross entropy, in chunks of tokens. The logits of all tokens are never there at once.

    logits = linear(x, w)                        x (.., h), w (c, h)
    loss = cross_entropy(logits, target)         linear_cross_entropy(x, w, target)

A million tokens have 128,256 logits each: 500 GB in float32. Of a sum over tokens the gradient of a token's logits is
known with its loss, but for the factor that is the gradient of the sum. So forward computes the logits of a chunk, its
losses and the gradients of its rows and, added up in at least float32, of the weight, and forgets the logits; backward
multiplies. That takes no product more than the two ops do, and chunks are as large as products need to be efficient.
The ops run as they are where the logits of a rank are few (``rows_at_once``).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.building import shape_of
from autopar.ir.lowered.cross_entropy import cross_entropy, gradient_of_logits, token_losses
from autopar.ir.lowered.loss_chunks import pair_of, rows_at_once
from autopar.ir.lowered.shards import Groups
from autopar.ir.ops import composite
from autopar.ir.primitives.collectives import apply
from autopar.ir.primitives.computed_once import computed_once


def chunked_call(loss: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of ``linear_cross_entropy`` in place of a loss in a rank's program, if it takes more than one chunk."""
    pair = pair_of(loss, (composite.cross_entropy, cross_entropy), step=False)
    if pair is None:
        return None
    *rows, classes = shape_of(pair.linear)
    if rows_at_once(prod(rows), classes) is None:
        return None
    x, weight, *bias = pair.linear.args
    return (x, weight, bias[0] if bias else None, loss.args[1]), dict(loss.kwargs)


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    groups: Groups
    rows: int


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the losses of tokens. x: (t, h), weight: (local c, h), bias: (local c,) or None, target: (t,)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, wanted: tuple[bool, ...], o: _Options
    ) -> Tensor:
        total, *gradients = computed_once(lambda: _by_chunks(x, weight, bias, target, wanted, o))
        ctx.save_for_backward(*gradients)
        ctx.wanted, ctx.dtypes = wanted, [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        return total.clone()  # of what is computed once nothing may be handed on as it is

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(ctx.saved_tensors)
        found = [
            (next(gradients) * grad).to(dtype) if wanted else None
            for wanted, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
        ]
        return (*found, None, None, None)


def _by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, wanted: tuple[bool, ...], o: _Options
) -> tuple[Tensor, ...]:
    """The sum of the losses, and its gradients by those of x, weight and bias that are ``wanted``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((), dtype=wide)
    made = [
        torch.zeros_like(tensor, dtype=tensor.dtype if tensor is x else wide) if want and tensor is not None else None
        for tensor, want in zip((x, weight, bias), wanted, strict=True)
    ]
    grad_x, grad_weight, grad_bias = made
    for start in range(0, len(x), o.rows):
        rows = slice(start, start + o.rows)
        logits = F.linear(x[rows], weight, bias).to(wide)
        found = token_losses(logits, target[rows], o.ignore_index, o.label_smoothing, o.groups)
        total += found.loss.sum()
        if not any(wanted):
            continue
        slope = gradient_of_logits(
            logits.sub_(found.log_sum.unsqueeze(-1)), found, None, o.label_smoothing, o.groups
        ).to(x.dtype)
        del logits
        if grad_x is not None:
            torch.mm(slope, weight, out=grad_x[rows])
        if grad_weight is not None:
            grad_weight += slope.mT @ x[rows]
        if grad_bias is not None:
            grad_bias += slope.sum(0, dtype=wide)
    return (total, *(gradient for gradient in made if gradient is not None))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: composite.Reduction = "mean",
    vocab_groups: Groups = (),
) -> Tensor:
    """``cross_entropy`` of ``linear``, its classes split over ``vocab_groups``.

    x: (..., h). weight: (local c, h). bias: (local c,). target: (...), global class numbers. Result: a scalar.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = rows_at_once(len(flat), len(weight))
    if rows is None:
        whole = partial(cross_entropy, vocab_groups=vocab_groups) if vocab_groups else composite.cross_entropy
        logits = F.linear(x, weight, bias)
        return whole(logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
    given = _Options(ignore_index, label_smoothing, vocab_groups, rows)
    total = cast(Tensor, apply(_ChunkedLoss, flat, weight, bias, target.reshape(-1), wanted, given))
    return total / (target != ignore_index).sum() if reduction == "mean" else total
