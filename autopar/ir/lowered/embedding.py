"""Embedding with the vocabulary split: each rank looks up the rows it has.

embedding(weight, ids)                       weight (v, h) in pieces of rows
embedding(weight, ids, groups=('tp',))       zeros for ids in other pieces; the sum over tp is the result
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.errors import UnsupportedOp
from autopar.ir.lowered.shards import Groups, arguments, axes_lowered, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.primitives.collectives import apply
from autopar.ir.rule import Assignment, FactorRule


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, first: int, padding_idx: int) -> Tensor:
        rows = weight.shape[0]
        local = indices - first
        outside = (local < 0) | (local >= rows)
        # Row number ``rows`` does not exist: it stands for every index that sends no gradient to this piece.
        silent = outside if padding_idx < 0 else outside | (indices == padding_idx)
        ctx.save_for_backward(local.masked_fill(silent, rows))
        ctx.rows = rows
        return F.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (local,) = ctx.saved_tensors
        # The padding index gets no gradient.
        grad_weight = torch.ops.aten.embedding_dense_backward(grad, local, ctx.rows, ctx.rows, False)
        return cast(Tensor, grad_weight), None, None, None


def embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *, groups: Groups) -> Tensor:
    """Rows of a (global v, h) table of which this rank has piece ``shard_index(groups)``; a summand over ``groups``.

    weight: (local v, h). indices: (...), global. Result: (..., h). The row ``padding_idx`` (-1: none) gets no
    gradient. No communication.
    """
    first = shard_index(groups) * weight.shape[0]
    return cast(Tensor, apply(_Lookup, weight, indices, first, padding_idx))


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces ``aten.embedding``."""
    call = arguments(node)
    for option in ("sparse", "scale_grad_by_freq"):
        if call[option]:
            where = node.meta.get("source", "no source line")
            raise UnsupportedOp(
                f"{node.name} ({where}): an embedding with {option}=True cannot have its "
                f"vocabulary split.\n  try: nn.Embedding(..., {option}=False)"
            )
    groups = axes_lowered("embedding", rule, assignment, mesh)
    return embedding, (call["weight"], call["indices"], call["padding_idx"]), {"groups": groups}
