"""Indexing with every position in order is a view.

    index(mask (B, S), [arange(B) as (B, 1, 1, 1), arange(S) as (1, 1, 1, S)])       reshape(mask, [B, 1, 1, S])
    index(x, [None, None, [4, 5]])                                                   slice(x, 2, 4, 6)

This is how padding masks are read by position functions. The index of a row says nothing about other
rows, which an ``index`` cannot know: it would need the whole batch on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.passes.contract import Pass

aten = torch.ops.aten

# Ops that keep the elements of a tensor with one dimension of size above 1, in order.
_KEEPS_ORDER = frozenset(
    {
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.reshape.default,
        aten.view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.expand.default,
        aten.clone.default,
    }
)


@dataclass(frozen=True)
class IdentityIndexToView(Pass[CapturedModel]):
    """``index`` by ``arange`` along separate dimensions is a permutation and a reshape, by known positions a slice."""

    name: ClassVar[str] = "identity-index-to-view"
    provides: ClassVar[frozenset[str]] = frozenset({"positions as views"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            span = _span(node)
            if span is not None:
                with graph.inserting_before(node):
                    piece = add_call(graph, mode, aten.slice.Tensor, (node.args[0], *span), like=node)
                node.replace_all_uses_with(piece)
                continue
            order = _order(node)
            if order is None:
                continue
            new: Any = node.args[0]
            with graph.inserting_before(node):
                if order != sorted(order):
                    new = add_call(graph, mode, aten.permute.default, (new, order), like=node)
                new = add_call(graph, mode, aten.reshape.default, (new, list(shape_of(node))), like=node)
            node.replace_all_uses_with(new)
        return captured


def _span(node: fx.Node) -> tuple[int, int, int] | None:
    """(dimension, start, end), if the node picks positions of one dimension that are known and follow each other."""
    if node.target is not aten.index.Tensor:
        return None
    tensor, indices = node.args
    assert isinstance(tensor, fx.Node) and isinstance(indices, (list, tuple))
    given = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, fx.Node)]
    if len(given) != 1:
        return None
    dim, index = given[0]
    value = index.meta.get("value")
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32) or value.ndim != 1:
        return None
    size, places = shape_of(tensor)[dim], value.tolist()
    first = places[0] % size if places else 0
    follows = places and [place % size for place in places] == list(range(first, first + len(places)))
    return (dim, first, first + len(places)) if follows else None


def _order(node: fx.Node) -> list[int] | None:
    """The order in which the dimensions of the indexed tensor appear in the result; None if it is no view."""
    if node.target is not aten.index.Tensor:
        return None
    tensor, indices = node.args
    assert isinstance(tensor, fx.Node) and isinstance(indices, (list, tuple))
    shape = shape_of(tensor)
    counting = [index for index in indices if isinstance(index, fx.Node) and counts(index)]
    if len(counting) != len(indices):
        return None
    rank = max(len(shape_of(index)) for index in counting)
    places: list[int] = []
    for dim, index in enumerate(counting):
        own = shape_of(index)
        wide = [place for place, size in enumerate(own) if size > 1]
        if index.meta["val"].numel() != shape[dim]:
            return None
        # A dimension of size one may stand anywhere.
        places.append(wide[0] + rank - len(own) if wide else -1)
    used = [place for place in places if place >= 0]
    if len(used) != len(set(used)):
        return None
    order = sorted(range(len(indices)), key=lambda dim: places[dim])
    return order + list(range(len(indices), len(shape)))


def counts(index: fx.Node) -> bool:
    """Whether ``index`` holds 0, 1, 2, ... along its only dimension of size above 1."""
    while index.target in _KEEPS_ORDER:
        inner = index.args[0]
        assert isinstance(inner, fx.Node)
        if inner.meta["val"].numel() != index.meta["val"].numel():
            return False
        index = inner
    if index.target is aten.arange.default:
        return True
    if index.target is aten.arange.start:
        return bool(index.args[0] == 0)
    return index.target is aten.arange.start_step and (*index.args, 1)[:3:2] == (0, 1)
