"""Attention with the query sequence split: each rank has some rows of the scores, and knows which.

    attention(q, k, v, kind='causal', scale=s)                               q (b, h, s, d), k and v whole
    attention(q, k, v, kind='causal', scale=s, query_groups=('cp',))         q (b, h, s / cp, d)

Keys that no local query sees are skipped. The gradients of k and v are summands. No communication.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.lowered.random import shard_randomness
from autopar.ir.lowered.shards import Groups, arguments, axes_sharded, axes_with, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.ops.biased_attention import masked_attention
from autopar.ir.ops.composite import both
from autopar.ir.ops.documents import attend_in_documents, in_one_piece, runs_of, same_document
from autopar.ir.ops.varlen import attend_at_once, takes_documents
from autopar.ir.primitives.values import has_values
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.sequence import Sight
from autopar.ir.torch_private import FakeTensor

# The factor of its rule that an attention's queries run over.
QUERIES = "s"

# Rows of queries that share one mask, where the kernel needs a mask: bounds the mask and the keys computed in vain.
_ROWS = 1024


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    *,
    kind: composite.AttentionKind,
    window: int | None = None,
    scale: float,
    dropout_p: float = 0.0,
    query_groups: Groups = (),
    random_groups: Groups = (),
) -> Tensor:
    """``composite.attention`` of this rank's queries: piece ``shard_index(query_groups)`` of the sequence.

    q: (B, Hq, local S, D). k, v: (B, Hkv, T, D). mask: its rows are those of the local queries, or broadcast. sinks:
    (Hq,). documents: (B, T) or (1, T), of whole rows.
    Dropout draws the numbers of this rank's shard over ``random_groups``.
    """
    first = shard_index(query_groups) * q.shape[2]
    if dropout_p > 0:
        with shard_randomness(q, random_groups):
            return _in_documents(q, k, v, mask, sinks, documents, kind, window, scale, dropout_p, first)
    return _in_documents(q, k, v, mask, sinks, documents, kind, window, scale, dropout_p, first)


def _in_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    kind: composite.AttentionKind,
    window: int | None,
    scale: float,
    dropout_p: float,
    first: int,
) -> Tensor:
    if documents is None or not has_values(documents):
        return _attention(q, k, v, mask, sinks, kind, window, scale, dropout_p, first)
    rows = runs_of(documents)
    if not in_one_piece(rows):
        mask = both(same_document(documents, first, q.shape[2]), mask)
        kind = "mask" if kind == "full" else kind
        return _attention(q, k, v, mask, sinks, kind, window, scale, dropout_p, first)

    if takes_documents(q, v, mask, sinks, kind, dropout_p):
        return attend_at_once(q, k, v, rows, first, kind=kind, window=window, scale=scale)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: int) -> Tensor:
        return _attention(q, k, v, mask, sinks, kind, window, scale, dropout_p, first)

    return attend_in_documents(q, k, v, mask, rows, first, attend)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    kind: composite.AttentionKind,
    window: int | None,
    scale: float,
    dropout_p: float,
    first: int,
) -> Tensor:
    length = q.shape[2]
    if first == 0 and kind in ("causal", "sliding"):
        k, v, mask = _keys(k, v, mask, 0, length)
    if first == 0 or kind in ("full", "mask"):
        return composite.attention(q, k, v, mask, sinks, kind=kind, window=window, scale=scale, dropout_p=dropout_p)
    reach = window if kind == "sliding" else None
    rows = (
        length if _has_lower_right_kernel(q, mask, reach) else min(length, _ROWS if reach is None else max(reach, 64))
    )
    parts = []
    for start in range(0, length, rows):
        end = min(start + rows, length)
        part_mask = mask[..., start:end, :] if mask is not None and mask.shape[-2] > 1 else mask
        parts.append(_rows(q[:, :, start:end], k, v, part_mask, sinks, first + start, reach, scale, dropout_p))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    first: int,
    window: int | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Queries at positions ``first`` and following against the keys that they see."""
    length = q.shape[2]
    begin = 0 if window is None else max(0, first - window + 1)
    k, v, mask = _keys(k, v, mask, begin, first + length)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if sinks is None and _has_lower_right_kernel(q, mask, window) and k.shape[2] == first + length:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(length, k.shape[2])  # type: ignore[no-untyped-call]
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout_p, scale=scale)
    position = torch.arange(first, first + length, device=q.device)[:, None]
    key_position = torch.arange(begin, begin + k.shape[2], device=q.device)
    seen = key_position <= position
    if window is not None:
        seen = seen & (key_position > position - window)
    if mask is not None:
        seen = seen & mask if mask.dtype is torch.bool else mask.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        return composite.attention(q, k, v, seen, sinks, kind="mask", scale=scale, dropout_p=dropout_p)
    return masked_attention(q, k, v, seen, scale=scale, dropout_p=dropout_p)


def _has_lower_right_kernel(q: Tensor, mask: Tensor | None, window: int | None) -> bool:
    """Whether a fused kernel takes queries that end where the keys end, with no mask in memory."""
    return q.device.type == "cuda" and not isinstance(q, FakeTensor) and mask is None and window is None


def _keys(k: Tensor, v: Tensor, mask: Tensor | None, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and mask columns of positions ``begin`` to ``end``."""
    if begin == 0 and end >= k.shape[2]:
        return k, v, mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., begin:end]
    return k[:, :, begin:end], v[:, :, begin:end], mask


def is_attention(node: fx.Node) -> bool:
    """Whether an op is an attention, composite or of ATen."""
    return node.target in (composite.attention, torch.ops.aten.scaled_dot_product_attention.default)


def attention_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Query, key, value and mask, and the options of ``composite.attention``, of any op that is an attention."""
    call = arguments(node)
    if node.target is composite.attention:
        operands = (call["q"], call["k"], call["v"], call["mask"])
        return operands, {name: call[name] for name in ("kind", "window", "scale", "dropout_p")}
    query = call["query"]
    scale = call["scale"] if call["scale"] is not None else query.meta["val"].shape[-1] ** -0.5
    kind = "causal" if call["is_causal"] else "full" if call["attn_mask"] is None else "mask"
    operands = (query, call["key"], call["value"], call["attn_mask"])
    return operands, {"kind": kind, "window": None, "scale": scale, "dropout_p": call["dropout_p"]}


def documents_of(node: fx.Node) -> fx.Node | None:
    """The documents that an attention is within; None if it is over whole rows."""
    found: fx.Node | None = arguments(node).get("documents")
    return found


def sight_of(node: fx.Node) -> Sight:
    """Positions that the queries of an attention see."""
    options = attention_arguments(node)[1]
    return Sight(options["kind"], options["window"])


def lengths_of(rule: FactorRule) -> tuple[int, int]:
    """Queries and keys of an attention, all ranks together."""
    queries, keys = (prod(rule.sizes[factor] for factor in rule.operands[p][-2]) for p in (0, 1))
    return queries, keys


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces ``composite.attention`` or ``aten.scaled_dot_product_attention``."""
    operands, kwargs = attention_arguments(node)
    kwargs["query_groups"] = axes_with({QUERIES}, assignment, mesh)
    kwargs["sinks"], kwargs["documents"] = arguments(node).get("sinks"), documents_of(node)
    if kwargs["dropout_p"] > 0:
        kwargs["random_groups"] = axes_sharded(rule, assignment, mesh)
    return attention, operands, kwargs
