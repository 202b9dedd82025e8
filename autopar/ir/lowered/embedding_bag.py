"""Bags of embeddings with the rows of the table split: each rank adds those that it has.

embedding_bag(weight, ids, mode='sum')                     weight (v, h) in pieces of rows
embedding_bag(weight, ids, mode='sum', groups=('tp',))     a summand over tp: other ranks' rows count zero times
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.lowered.shards import Groups, arguments, axes_lowered, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    per_sample_weights: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    mode: str,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    groups: Groups,
) -> Tensor:
    """``composite.embedding_bag`` of a (global V, h) table of which this rank has piece ``shard_index(groups)``.

    weight: (local V, h). indices: (B, L) or (N,), global. mode: "sum" or "mean". Result: (B, h), a summand over
    ``groups``. No communication.
    """

    def total(table: Tensor, rows: Tensor, times: Tensor) -> Tensor:
        return F.embedding_bag(
            rows, table, offsets, per_sample_weights=times, mode="sum", include_last_offset=include_last_offset
        )

    local = indices - shard_index(groups) * weight.shape[0]
    outside = (local < 0) | (local >= weight.shape[0])
    counts = torch.ones_like(outside) if padding_idx is None else indices != padding_idx
    times = (counts & ~outside).to(weight.dtype)
    if per_sample_weights is not None:
        times = times * per_sample_weights
    result = total(weight, local.masked_fill(outside, 0), times)
    if mode == "mean":
        number = total(weight.new_ones(1, 1), torch.zeros_like(indices), counts.to(weight.dtype))
        result = result / number.clamp(min=1)
    return result


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces ``composite.embedding_bag``."""
    call = arguments(node)
    operands = ("weight", "indices", "per_sample_weights", "offsets")
    options = {name: value for name, value in call.items() if name not in operands}
    groups = axes_lowered("embedding_bag", rule, assignment, mesh)
    return embedding_bag, tuple(call[name] for name in operands), {**options, "groups": groups}
