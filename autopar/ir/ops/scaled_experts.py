"""Products of experts in narrow floats: each expert is a linear layer of its own, by a recipe.

    y[r] = x[r] w[e]^T        for the rows r of expert e, which are sorted by expert

Its maxima are over all ranks that hold some of its rows, or pieces of its weight. The rows of an expert may be on
several ranks, in an order that depends on how they got there, so no tile of rows can be the same everywhere: where
scales are of tiles, the product of a weight's gradient is in the dtype of the other ops.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.quantise import quantised
from autopar.ir.ops.scaled_kernels import product
from autopar.ir.ops.scalings import SCALINGS, Recipe, Scaling
from autopar.ir.ops.shared_maxima import Groups, Side, shared_maxima
from autopar.ir.primitives.collectives import apply, communicates_backward


def scaled_grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, recipe: Recipe, rows: Groups, depth: Groups, columns: Groups
) -> Tensor:
    """Rows, sorted by expert, each through its expert's weight: (rows, k), (E, n, k) -> (rows, n).

    ends: (E,), where the rows of each expert end. rows, depth, columns: groups of ranks that hold other rows of the
    experts, and pieces of k and n. Every rank of a group calls it, also without rows.
    """
    result: Tensor = apply(_ScaledGroupedLinear, x, weight, ends, recipe, rows, depth, columns)
    return result


class _ScaledGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, recipe: Recipe, rows: Groups, depth: Groups, columns: Groups
    ) -> Tensor:
        scaling, spans = SCALINGS[recipe], _spans(ends)
        sides = [
            side
            for expert, span in enumerate(spans)
            for side in (Side(x[span], rows, depth), Side(weight[expert], columns, depth, weight=True))
        ]
        largest = shared_maxima(sides, scaling)
        ctx.scaling, ctx.groups, ctx.spans = scaling, (rows, depth, columns), spans
        known = [torch.stack(largest)] if scaling.shared == "tensor" else []  # type: ignore[arg-type]  # it has them
        ctx.save_for_backward(x, weight, *known)
        # Its two gradients share what is sent, so both are in one part of a split backward.
        communicates_backward(ctx)
        return torch.cat(_products(sides, largest, scaling, x.dtype, gradient=False))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, *known), scaling, spans = ctx.saved_tensors, ctx.scaling, ctx.spans
        rows, depth, columns = ctx.groups
        of_x, of_weight = ctx.needs_input_grad[:2]
        scaled_weight = of_weight and scaling.reach != "tile"
        inputs, weights = list[Side](), list[Side]()
        for expert, span in enumerate(spans):
            if of_x:
                inputs += Side(grad[span], rows, columns), Side(weight[expert].t(), depth, columns, weight=True)
            if scaled_weight:
                weights += Side(grad[span].t(), columns, rows), Side(x[span].t(), depth, rows)
        largest: list[Any]
        if known and (of_x or scaled_weight):
            of_grad = shared_maxima([Side(grad[span], rows, columns) for span in spans], scaling)
            of_inputs, of_weights = known[0][::2], known[0][1::2]
            largest = [own for pair in zip(of_grad, of_weights, strict=True) for own in pair] if of_x else []
            largest += [own for pair in zip(of_grad, of_inputs, strict=True) for own in pair] if scaled_weight else []
        else:
            largest = list(shared_maxima([*inputs, *weights], scaling))
        grad_x = grad_weight = None
        if of_x:
            grad_x = torch.cat(_products(inputs, largest, scaling, x.dtype, gradient=True))
        if scaled_weight:
            grad_weight = torch.stack(_products(weights, largest[len(inputs) :], scaling, x.dtype, gradient=True))
        elif of_weight:
            grad_weight = torch.stack([grad[span].t() @ x[span] for span in spans])
        return grad_x, grad_weight, None, None, None, None, None


def _spans(ends: Tensor) -> list[slice]:
    """Rows of every expert."""
    limits = [0, *ends.tolist()]
    return [slice(first, last) for first, last in pairwise(limits)]


def _products(
    sides: list[Side], largest: list[Any], scaling: Scaling, dtype: torch.dtype, *, gradient: bool
) -> list[Tensor]:
    """The product of each two sides. gradient: whether the first of them is one."""
    found = []
    for number in range(0, len(sides), 2):
        first, second = sides[number], sides[number + 1]
        form = scaling.gradient if gradient else scaling.value
        a = quantised(first.matrix, largest[number], form, scaling, weight=False)
        b = quantised(second.matrix, largest[number + 1], scaling.value, scaling, weight=second.weight)
        found.append(product(a, b, dtype, fast=not gradient))
    return found
