"""Products of matrices in 8-bit floats, with their gradients, by a recipe.

    y  = x  w^T        x (m, k), w (n, k)        each product is of the form a (r, d), b (c, d) -> a b^T. Both operands
    gx = g  w          g (m, n), w^T (k, n)      are scaled into the range of an 8-bit float and rounded to it
    gw = g^T x         g^T (n, m), x^T (k, m)    (``quantise``), by scales that the recipe says (``scalings``)

A scale follows from the largest magnitude of what it is for. Where ranks hold pieces of a tensor or a row, they take
the maximum over all of them, so that each rounds as one process would: ``rows``, ``depth`` and ``columns`` name the
groups of ranks that hold pieces of m, k and n. Tiles are never in pieces: parts of a dimension have whole ones. In
delayed scaling the maxima are those of the steps before (``maxima_history``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.errors import InvalidInput
from autopar.ir.ops.maxima_history import GRADIENT, INPUT, WEIGHT, known_largest, note_largest
from autopar.ir.ops.quantise import quantised
from autopar.ir.ops.scaled_kernels import product
from autopar.ir.ops.scalings import SCALINGS, Recipe
from autopar.ir.ops.shared_maxima import Groups, Side, shared_maxima
from autopar.ir.primitives.collectives import apply, communicates_backward
from autopar.ir.primitives.group_communication import group_size


def scaled_product(
    x: Tensor,
    weight: Tensor,
    recipe: Recipe,
    rows: Groups,
    depth: Groups,
    columns: Groups,
    history: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T`` by ``recipe``. x: (m, k). weight: (n, k). Result: (m, n), of x's dtype; partial over ``depth``.

    rows, depth, columns: groups of ranks that hold pieces of m, k and n. history: of delayed scaling, in which what is
    computed with gradients is noted. Raises InvalidInput for rows that share a tile with those of another rank.
    """
    tile = SCALINGS[recipe].tile
    assert (history is not None) == (SCALINGS[recipe].steps > 0), f"{recipe} and a history"
    if x.shape[0] % tile and any(group_size(group) > 1 for group in rows):
        raise InvalidInput(
            f"a linear layer in {recipe} has {x.shape[0]} rows on this rank, and others have the rest.\n  expected: a "
            f"multiple of {tile}, as that many rows share scales in backward\n  try: as many samples or positions a "
            "microbatch as make one on each rank, or another recipe"
        )
    if history is not None and torch.is_grad_enabled():
        note_largest(history, INPUT, x)
        note_largest(history, WEIGHT, weight)
    result: Tensor = apply(_ScaledProduct, x, weight, recipe, rows, depth, columns, history)
    return result


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        recipe: Recipe,
        rows: Groups,
        depth: Groups,
        columns: Groups,
        history: Tensor | None,
    ) -> Tensor:
        scaling = SCALINGS[recipe]
        sides = Side(x, rows, depth), Side(weight, columns, depth, weight=True)
        largest: Sequence[Tensor | None]
        if history is None:
            largest = shared_maxima(sides, scaling)
        else:
            largest = [known_largest(history, row, scaling.value) for row in (INPUT, WEIGHT)]
        first, second = (
            quantised(side.matrix, own, scaling.value, scaling, weight=side.weight)
            for side, own in zip(sides, largest, strict=True)
        )
        ctx.scaling, ctx.groups, ctx.history = scaling, (rows, depth, columns), history
        # Those of whole tensors hold for backward, of rows there are others, along another dimension.
        ctx.save_for_backward(x, weight, *(own for own in largest if own is not None and own.dim() == 0))
        # Its two gradients share what is computed, and what is sent, so both are in one part of a split backward.
        communicates_backward(ctx)
        return product(first, second, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, *known), scaling, (rows, depth, columns) = ctx.saved_tensors, ctx.scaling, ctx.groups
        of_x, of_weight = ctx.needs_input_grad[:2]
        sides: list[Side] = []
        if of_x:
            sides += Side(grad, rows, columns), Side(weight.t(), depth, columns, weight=True)
        if of_weight:
            sides += Side(grad.t(), columns, rows), Side(x.t(), depth, rows)
        largest: Sequence[Tensor | None]
        if known:
            of_grad: Tensor | None
            if ctx.history is None:
                (of_grad,) = shared_maxima([Side(grad, rows, columns)], scaling)
            else:
                of_grad = known_largest(ctx.history, GRADIENT, scaling.gradient)
                note_largest(ctx.history, GRADIENT, grad)
            largest = [of_grad, known[1]] * of_x + [of_grad, known[0]] * of_weight
        else:
            largest = shared_maxima(sides, scaling)
        forms = (scaling.gradient, scaling.value) * 2
        operands = [
            quantised(side.matrix, own, form, scaling, weight=side.weight)
            for side, own, form in zip(sides, largest, forms, strict=False)
        ]
        products = [
            product(first, second, x.dtype, fast=False)
            for first, second in zip(operands[::2], operands[1::2], strict=True)
        ]
        grad_x = products[0] if of_x else None
        grad_weight = products[-1] if of_weight else None
        return grad_x, grad_weight, None, None, None, None, None
