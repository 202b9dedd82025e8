"""scaled_dot_product_attention with a mask tensor and repeated heads becomes ``composite.attention``.

    k2 = reshape(expand(unsqueeze(k, 2), [B, 8, 4, T, D]), [B, 32, T, D])
    m = le(positions, positions') & same_document
    scaled_dot_product_attention(q, k2, v2, m)            attention(q, k, v, kind=causal, scale=..)

See ``masks.py`` for what a mask can mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops import composite
from autopar.ir.torch_private import FakeTensorMode
from autopar.passes.contract import Pass
from autopar.passes.normalise.masks import MaskMeaning, MaskReader, joined, smallest

aten = torch.ops.aten


@dataclass(frozen=True)
class RecogniseAttention(Pass[CapturedModel]):
    """Attention with a kind of mask in place of a mask tensor, and grouped heads in place of repeated ones."""

    name: ClassVar[str] = "recognise-attention"
    provides: ClassVar[frozenset[str]] = frozenset({"kinds of masks"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        reader = MaskReader()
        masks: dict[MaskMeaning, fx.Node] = {}
        for node in list(call_nodes(graph)):
            if node.target in (aten.scaled_dot_product_attention.default, composite.attention):
                _rewrite(graph, mode, node, reader, masks)
        return captured


def _rewrite(
    graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, reader: MaskReader, masks: dict[MaskMeaning, fx.Node]
) -> None:
    q, k, v, mask, dropout_p, is_causal = _arguments(node)
    sinks, documents = (*node.args, *[None] * 6)[4:6] if node.target is composite.attention else (None, None)
    rank = len(shape_of(q))
    if rank not in (3, 4):
        return
    queries, keys = shape_of(q)[-2], shape_of(k)[-2]
    causal = bool(is_causal)
    meaning = MaskMeaning(kind="causal" if causal else "full")
    if mask is not None:
        meaning = reader.read(mask, queries=queries, keys=keys, causal=causal)
    operand: fx.Node | None = None
    if meaning.parts:
        if meaning not in masks:
            masks[meaning] = _operand(graph, mode, meaning, reader, max(meaning.parts), rank)
        operand = masks[meaning]
    scale = node.kwargs.get("scale")
    options: dict[str, Any] = {
        "kind": meaning.kind,
        "scale": 1 / math.sqrt(shape_of(q)[-1]) if scale is None else scale,
    }
    if meaning.window is not None:
        options["window"] = meaning.window
    if dropout_p:
        options["dropout_p"] = dropout_p
    with graph.inserting_before(node):
        if rank == 3:
            q, k, v = (add_call(graph, mode, aten.unsqueeze.default, (x, 1), like=node) for x in (q, k, v))
        k, v = _grouped(q, k, v)
        if meaning.documents is not None:
            documents = _rows_of(graph, mode, meaning.documents, node)
        args: list[Any] = [q, k, v, operand, sinks, documents]
        while args[-1] is None:
            args.pop()
        value = node.meta["val"] if rank == 4 else None
        result = add_call(graph, mode, composite.attention, tuple(args), options, like=node, value=value)
        if rank == 3:
            result = add_call(graph, mode, aten.reshape.default, (result, list(shape_of(node))), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node | None, float, bool]:
    if node.target is composite.attention:
        q, k, v, mask = (*node.args, None)[:4]
        return q, k, v, mask, node.kwargs.get("dropout_p", 0.0), False  # type: ignore[return-value]
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return tuple(given[name] for name in names)


def _grouped(q: fx.Node, k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values before their heads were repeated, if both were."""
    few_k, few_v = before_repeat(k), before_repeat(v)
    if few_k is None or few_v is None or shape_of(few_k)[1] != shape_of(few_v)[1]:
        return k, v
    return (few_k, few_v) if shape_of(q)[1] % shape_of(few_k)[1] == 0 else (k, v)


def before_repeat(heads: fx.Node) -> fx.Node | None:
    """x, if ``heads`` is x (B, H, T, D) with each head n times in a row: (B, H * n, T, D)."""
    if heads.target is aten.repeat_interleave.self_int:
        source, dim = heads.args[0], heads.args[2] if len(heads.args) > 2 else heads.kwargs.get("dim")
        return source if isinstance(source, fx.Node) and dim in (1, -3) else None
    if heads.target is not aten.reshape.default:
        return None
    expanded = heads.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return None
    inserted = expanded.args[0]
    if not isinstance(inserted, fx.Node) or inserted.target is not aten.unsqueeze.default:
        return None
    source = inserted.args[0]
    if not isinstance(source, fx.Node) or len(shape_of(source)) != 4 or inserted.args[1] not in (2, -3):
        return None
    batch, few, length, size = shape_of(source)
    times = shape_of(expanded)[2]
    same = shape_of(expanded) == (batch, few, times, length, size)
    return source if same and shape_of(heads) == (batch, few * times, length, size) else None


def _rows_of(graph: fx.Graph, mode: FakeTensorMode, documents: fx.Node, like: fx.Node) -> fx.Node:
    """Documents as (B, S) or (1, S)."""
    if len(shape_of(documents)) == 2:
        return documents
    return add_call(graph, mode, aten.unsqueeze.default, (documents, 0), like=like)


def _operand(
    graph: fx.Graph, mode: FakeTensorMode, meaning: MaskMeaning, reader: MaskReader, last: fx.Node, rank: int
) -> fx.Node:
    """The mask operand, made right after the last of its parts."""
    where = last.next
    while where.op == "placeholder":
        where = where.next
    with graph.inserting_before(where):
        parts = []
        for part in meaning.parts:
            if rank == 3 and len(shape_of(part)) == 3:
                part = add_call(graph, mode, aten.unsqueeze.default, (part, 1), like=where)
            parts.append(smallest(graph, mode, part, reader.evaluator, where))
        return joined(graph, mode, tuple(parts), where)
