"""Losses.

cross_entropy   d0 d1 c, d0 d1 ->           c is lowered; d0 and d1 are summed; blocked under a mean
mse_loss        d0 d1, d0 d1 ->             d0 and d1 are summed; lowered "mean" under a mean
ctc_loss        _0 n _1, n _2, n, n -> n    a sample for itself
"""

from __future__ import annotations

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, aligned, numbered, numel, operand_factors, table

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def composite(call: Call) -> FactorRule | None:
    """``autopar.ir.ops.composite.cross_entropy``: classes last."""
    bound = call.bound()
    logits, target = bound["logits"], bound["target"]
    factors = Factors()
    lead = factors.dims(numbered(len(target.shape)), target.shape)
    c = factors.dim("c", logits.shape[-1])
    return _token_loss(call, factors, {logits.position: (*lead, c), target.position: lead}, lead, bound["reduction"])


def _token_loss(
    call: Call,
    factors: Factors,
    known: dict[int, TensorFactors],
    lead: TensorFactors,
    reduction: str,
) -> FactorRule:
    """A loss of one class index per token. A mean counts those that are not ``ignore_index``, of all tokens at once."""
    tokens = [f for dim in lead for f in dim]
    if reduction == "mean":
        factors.blocked.update(tokens)
    results: list[TensorFactors] = [lead if reduction == "none" else ()]
    results += [()] * (len(call.results) - 1)  # the count of targets
    return factors.rule(
        operand_factors(call, known, factors),
        results,
        summed=tokens if reduction == "sum" else (),
        lowered={"c": "cross_entropy"},
        flops=6 * numel(call.operands[0].shape),
    )


def cross_entropy_loss(call: Call) -> FactorRule | None:
    """ATen's: classes in dimension 1 (0 of a vector); targets are indices or probabilities."""
    bound = call.bound()
    x, target, weight = bound["self"], bound["target"], bound["weight"]
    factors = Factors()
    position = 1 if len(x.shape) > 1 else 0
    c = factors.dim("c", x.shape[position])
    shape = (*x.shape[:position], *x.shape[position + 1 :])
    names = numbered(len(shape))
    lead = factors.dims(names, shape)
    logits = (*lead[:position], c, *lead[position:])
    reduction = _REDUCTIONS[bound["reduction"]]
    if weight is not None or target.shape == x.shape:
        factors.blocked.add("c")
    known: dict[int, TensorFactors] = {x.position: logits}
    if weight is not None:
        known[weight.position] = (c,)
    if target.shape == shape:
        known[target.position] = lead
        return _token_loss(call, factors, known, lead, reduction)
    if target.shape != x.shape:
        return None
    # Probabilities: every token counts, so that a mean is a plain one.
    known[target.position] = logits
    tokens = [f for dim in lead for f in dim]
    return factors.rule(
        operand_factors(call, known, factors),
        [lead if reduction == "none" else ()],
        summed=tokens if reduction != "none" else (),
        lowered=dict.fromkeys(tokens, "mean") if reduction == "mean" else None,
        flops=6 * numel(x.shape),
    )


def nll_loss(call: Call) -> FactorRule | None:
    """From log probabilities: the classes stay whole."""
    bound = call.bound()
    x, target, weight = bound["self"], bound["target"], bound["weight"]
    factors = Factors()
    position = 1 if len(x.shape) > 1 else 0
    shape = (*x.shape[:position], *x.shape[position + 1 :])
    if target.shape != shape or len(call.results) > 1:
        return None
    c: DimFactors = factors.dim("c", x.shape[position], block=True)
    lead = factors.dims(numbered(len(shape)), shape)
    known: dict[int, TensorFactors] = {
        x.position: (*lead[:position], c, *lead[position:]),
        target.position: lead,
    }
    if isinstance(weight, Operand):
        known[weight.position] = (c,)
    return _token_loss(call, factors, known, lead, _REDUCTIONS[bound["reduction"]])


def ctc(call: Call) -> FactorRule | None:
    """``autopar.ir.ops.ctc``: T steps for each of the 2 S + 1 places between and at the targets."""
    bound = call.bound()
    log_probs, targets = bound["log_probs"], bound["targets"]
    steps, samples, classes = log_probs.shape
    factors = Factors()
    n = factors.dim("b", samples)
    known: dict[int, TensorFactors] = {
        log_probs.position: (factors.fresh(steps), n, factors.fresh(classes)),
        targets.position: (n, factors.fresh(targets.shape[1])),
        **{bound[name].position: (n,) for name in ("input_lengths", "target_lengths")},
    }
    flops = 10 * steps * samples * (2 * targets.shape[1] + 1)
    return factors.rule(operand_factors(call, known, factors), [(n,)], flops=flops)


def elementwise(call: Call) -> FactorRule | None:
    """A pointwise loss and its reduction; a mean divides by the number of elements."""
    bound = call.bound()
    x = call.operands[0]
    reduction = _REDUCTIONS[bound["reduction"]]
    factors = Factors()
    shape = x.shape
    for operand in call.operands[1:2]:
        if len(operand.shape) == len(shape):
            shape = tuple(max(a, b) for a, b in zip(shape, operand.shape))
    dims = factors.dims(numbered(len(shape)), shape)
    operands = [aligned(dims, shape, operand.shape) for operand in call.operands]
    if any(o is None for o in operands) or any(r.shape not in ((), shape) for r in call.results):
        return None
    names = [f for dim in dims for f in dim]
    return factors.rule(
        [o for o in operands if o is not None],
        [dims if reduction == "none" else ()],
        summed=names if reduction != "none" else (),
        lowered=dict.fromkeys(names, "mean") if reduction == "mean" else None,
        flops=4 * numel(shape),
    )


RULES: dict[str, Rule] = {
    "autopar::ctc_loss": ctc,
    "autopar::cross_entropy": composite,
    "aten::cross_entropy_loss": cross_entropy_loss,
    "aten::nll_loss": nll_loss,
    "aten::nll_loss2d": nll_loss,
    "aten::nll_loss_nd": nll_loss,
}
RULES.update(
    table(
        elementwise,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
        "kl_div soft_margin_loss hinge_embedding_loss margin_ranking_loss poisson_nll_loss",
    )
)
