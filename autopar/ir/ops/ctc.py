"""The loss of connectionist temporal classification as one op, on targets with a row for each sample.

    ctc_loss(log_probs, labels.masked_select(labels >= 0), ..)   ->   ctc_loss(log_probs, rows, ..)   one loss a sample

How much torch's kernel keeps depends on the lengths, and the size of targets that are joined to one vector on a mask;
a trace knows neither. The op keeps its operands alone, and its targets have the width of the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.ir.autograd.replacing import replaced
from autopar.ir.autograd.trial import is_apart

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The negative log likelihood of each sample.

    log_probs: (T, N, C). targets: (N, S) integers, of which the first ``target_lengths`` count. input_lengths,
    target_lengths: (N,) integers. Result: (N,).
    """
    return _with_table(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0].to(log_probs.dtype)


@_ctc_loss.register_fake
def _(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = input_lengths, target_lengths
    loss, table = _with_table(log_probs, targets, *lengths, blank, zero_infinity)
    wide = _wide(log_probs)
    result: Tensor = aten._ctc_loss_backward.Tensor(
        grad.to(wide.dtype).contiguous(), wide, targets, *lengths, loss, table, blank, zero_infinity
    )
    return result.to(log_probs.dtype)


@_ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.autopar.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_ctc_loss.register_autograd(_backward, setup_context=_remember)


def _with_table(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each sample, and the likelihoods of all that could have been said until each step."""
    loss, table = aten._ctc_loss.Tensor(_wide(log_probs), targets, input_lengths, target_lengths, blank, zero_infinity)
    return loss.masked_fill(loss.isinf(), 0.0) if zero_infinity else loss, table


def _wide(log_probs: Tensor) -> Tensor:
    """What torch's kernel computes in: it has none for 16 bits."""
    return log_probs if log_probs.dtype == torch.float64 else log_probs.float()


@contextmanager
def ctc_loss_is_one_op() -> Iterator[None]:
    """Within, torch's ``ctc_loss`` is the op of this file."""
    joined: list[tuple[Tensor, Tensor, Tensor]] = []
    select: Callable[..., Tensor] = torch.masked_select
    loss: Callable[..., Tensor] = torch.ctc_loss

    def masked_select(input: Tensor, mask: Tensor) -> Tensor:
        result = select(input, mask)
        if input.dim() == 2 and input.shape == mask.shape:
            joined.append((result, input, mask))
        return result

    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:
        if is_apart():
            return loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        if log_probs.dim() == 2:
            one = ctc_loss(
                log_probs[:, None], targets.view(1, -1), _at_least_one(input_lengths), _at_least_one(target_lengths),
                blank, reduction, zero_infinity,
            )  # fmt: skip
            return one.view(()) if reduction == 0 else one
        lengths = [torch.as_tensor(given, device=log_probs.device) for given in (input_lengths, target_lengths)]
        if targets.dim() == 1:
            made = next(((x, mask) for result, x, mask in joined if result is targets), None)
            targets = _split(targets, lengths[1]) if made is None else _to_the_left(*made)
        losses: Tensor = torch.ops.autopar.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
        if reduction == 1:
            return (losses / lengths[1].clamp(min=1)).mean()
        return losses.sum() if reduction == 2 else losses

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "ctc_loss", ctc_loss),
            (torch, "masked_select", masked_select),
            (Tensor, "masked_select", masked_select),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def _at_least_one(lengths: Any) -> Any:
    return lengths.view(1) if isinstance(lengths, Tensor) else torch.as_tensor(lengths).view(1)


def _to_the_left(x: Tensor, mask: Tensor) -> Tensor:
    """Every row of ``x`` (N, S) with what ``mask`` chooses first, in its order."""
    return x.gather(1, mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True))


def _split(targets: Tensor, lengths: Tensor) -> Tensor:
    """Targets that are joined to one vector, (M,), with a row for each sample that begins with its own: (N, M)."""
    begins = lengths.cumsum(0) - lengths
    places = begins[:, None] + torch.arange(len(targets), device=targets.device)
    return targets[places.clamp(max=len(targets) - 1)]
