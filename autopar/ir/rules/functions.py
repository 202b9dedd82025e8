"""Autograd functions: the factors that trying finds, forward and with their own backward.

The backward need not be the derivative of the forward, nor linear in the gradient: it may limit its norm. Where it is
not linear, the summands of a gradient are summed before it runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.rule import FactorRule
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import replicated_rule
from autopar.ir.rules.isolated import isolated
from autopar.ir.rules.probe import LIMIT_S, REFUSALS, Trial, node_of, probe, shrunk, trials_of
from autopar.ir.rules.proof import Run, gradients, runner

_TOLERANCE = 1e-4


def function_rule(call: Call) -> tuple[FactorRule, bool]:
    """The rule of a call, and whether anything was found out about it: if not, every rank repeats it."""
    target = call.target
    assert isinstance(target, FunctionOp)
    whole = replicated_rule(call)
    flops = target.flops or whole.flops
    if target.draws:
        return replace(whole, flops=flops, nonlinear=True), False
    found = probe(call)
    return replace(found or whole, flops=flops, nonlinear=not is_linear(call)), found is not None


def is_linear(call: Call) -> bool:
    """Whether the backward of a sum of gradients is the sum of their backwards."""
    small = shrunk(call)
    run = runner(node_of(small))

    def tried() -> bool:
        trials = trials_of(run, small)
        return bool(trials) and all(_adds_up(run, trial) for trial in trials)

    return isolated(tried, limit_s=LIMIT_S) or False


def _adds_up(run: Run, trial: Trial) -> bool:
    generator = torch.Generator().manual_seed(7)
    values = [value.clone().requires_grad_(value.is_floating_point()) for value in trial.values]
    results = run(values, None)

    def draw() -> list[Tensor | None]:
        return [
            trial.scale * torch.randn(r.shape, generator=generator).to(r.dtype) if r.is_floating_point() else None
            for r in results
        ]

    a, b = draw(), draw()
    both = [None if p is None or q is None else p + q for p, q in zip(a, b, strict=True)]
    try:
        parts = [gradients(run(values, None), cotangents, values) for cotangents in (a, b, both)]
    except REFUSALS:
        return False
    return all(_same(p, q, whole) for p, q, whole in zip(*parts, strict=True))


def _same(p: Tensor | None, q: Tensor | None, whole: Tensor | None) -> bool:
    if p is None or q is None or whole is None:
        return p is q is whole
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    return bool(torch.allclose(p + q, whole, rtol=_TOLERANCE, atol=_TOLERANCE * max(1.0, largest)))
