"""Mixture of experts.

    d0 d1 h, d0 d1 _k, d0 d1 _k, experts u h, experts h u, .. -> d0 d1 h      gated: u is blocked
    d0 d1 h, d0 d1 _k, d0 d1 _k, experts (f 2) h, experts h f, .. -> d0 d1 h  gate and value interleaved

Tokens are independent of each other, so every token dimension is a factor. Experts are summed: a rank adds what its own
contribute to its tokens. Tokens and experts on one axis ("d0&experts") is dispatch and combine: tokens travel to their
experts and back. An expert's inner width ``f`` is summed; with a gate the two halves of ``w_up``'s rows would have to
be cut alike, which contiguous pieces are not.

A capacity makes tokens depend on those before them: only the outermost token dimension is a factor then, and it is
lowered, to count over its pieces.

In narrow floats every token dimension and the inner width are lowered, as ranks share scales.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from torch import fx

from autopar.ir.graph import tensor_operands
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import Factors, Rule, numbered, numel, operand_factors

EXPERTS = "experts"


def moe(call: Call) -> FactorRule | None:
    """``autopar.ir.ops.composite.moe``."""
    bound = call.bound()
    x, index, weight = bound["x"], bound["expert_index"], bound["expert_weight"]
    up, down, b_up, b_down = bound["w_up"], bound["w_down"], bound["b_up"], bound["b_down"]
    gated = bound["gated"]
    factors = Factors()
    lead = factors.dims(numbered(len(x.shape) - 1), x.shape[:-1])
    h = factors.dim("h", x.shape[-1], block=True)
    k = factors.dim("k", index.shape[-1], block=True)
    e = factors.dim(EXPERTS, up.shape[0])
    inner = down.shape[2]
    interleaved = bound["interleaved"]
    f = factors.dim("f", inner, block=gated and not interleaved)
    u = f
    if gated:
        u = f + factors.dim("halves", 2) if interleaved else factors.dim("halves", 2) + f
    known = {
        x.position: (*lead, h),
        index.position: (*lead, k),
        weight.position: (*lead, k),
        up.position: (e, u, h),
        down.position: (e, h, f),
    }
    if b_up is not None:
        known[b_up.position] = (e, u)
    if b_down is not None:
        known[b_down.position] = (e, h)
    limited, recipe = bound["capacity_factor"] is not None, bound["recipe"]
    if limited:
        # Which rows an expert takes depends on their order, which only the outermost dimension keeps.
        factors.blocked |= {name for dim in lead[1:] for name in dim}
    dispatches = [f"{name}&{EXPERTS}" for dim in lead[: 1 if limited else None] for name in dim] if e else []
    # Where a capacity counts tokens their order matters.
    name = "moe" if limited or recipe is None else "scaled_moe"
    lowered = dict.fromkeys((EXPERTS, *dispatches), name)
    if b_down is not None or recipe is not None:
        lowered["f"] = name
    if limited or recipe is not None:
        lowered |= dict.fromkeys((token for dim in lead[: 1 if limited else None] for token in dim), name)
    rows = numel(index.shape) * min(1.0, bound["capacity_factor"] or 1.0)
    rule = factors.rule(
        operand_factors(call, known, factors),
        [(*lead, h)],
        summed=("f", EXPERTS),
        lowered=lowered,
        joint=dispatches,
        flops=2 * rows * x.shape[-1] * (up.shape[1] + inner),
    )
    if recipe is None:
        return rule
    return replace(rule, nonlinear=True, multiples={"f": SCALINGS[recipe].multiple_of_parts})


def expert_factors(node: fx.Node, rule: FactorRule, parameters: Container[str]) -> frozenset[str]:
    """Factors of an op that are experts.

    Those of a mixture of experts, or the first of a stack of matrices that are each multiplied with rows of their own:
    ``experts t k, experts k n -> experts t n``.
    """
    if EXPERTS in rule.sizes:
        return frozenset({EXPERTS})
    found: set[str] = set()
    results = _factors(rule.results)
    for position, operand in enumerate(tensor_operands(node)):
        own = rule.operands[position]
        if operand.name not in parameters or len(own) != 3 or len(own[0]) != 1:
            continue
        others = _factors((*rule.operands[:position], *rule.operands[position + 1 :]))
        matrix = _factors((own[1:],))
        if own[0][0] in others & results and matrix & others - results and matrix & results - others:
            found.add(own[0][0])
    return frozenset(found)


def _factors(tensors: Iterable[TensorFactors]) -> set[str]:
    return {f for tensor in tensors for dim in tensor for f in dim}


RULES: dict[str, Rule] = {"autopar::moe": moe}
