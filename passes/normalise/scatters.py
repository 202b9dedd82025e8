"""Writes into a slice become concatenations, and filled tensors become broadcasts.

    slice_scatter(base, x, 1, 1, 32)                      cat([slice(base, 1, 0, 1), x, slice(base, 1, 32, n)], 1)
    select_scatter(base, x, 1, 0)                         cat([unsqueeze(x, 1), slice(base, 1, 1, n)], 1)
    fill(x, value)                                        expand(value, shape of x)

They come from ``y = zeros(..); y[:, 1:] = x``, which is how labels are shifted. A concatenation needs no
rule of its own, and what is overwritten is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.torch_private import FakeTensorMode
from autopar.passes.contract import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class ScattersToCat(Pass[CapturedModel]):
    """Functional slice writes as concatenations."""

    name: ClassVar[str] = "scatters-to-cat"
    provides: ClassVar[frozenset[str]] = frozenset({"writes as concatenations"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            span = _span(node)
            if span is not None:
                _to_cat(graph, mode, node, *span)
            elif node.target is aten.fill.Tensor:
                _to_expand(graph, mode, node)
            elif node.target is aten.broadcast_tensors.default:
                _to_expands(graph, mode, node)
        return captured


def _span(node: fx.Node) -> tuple[int, int, int] | None:
    """(dimension, start, end) that a scatter writes."""
    if node.target is aten.select_scatter.default:
        dim, position = _as_int(node.args[2]) % len(shape_of(node)), _as_int(node.args[3])
        position %= shape_of(node)[dim]
        return dim, position, position + 1
    if node.target is not aten.slice_scatter.default:
        return None
    where: tuple[Any, ...] = (*node.args[2:], *(0, None, None, 1)[len(node.args) - 2 :])
    dim = _as_int(where[0]) % len(shape_of(node))
    low, high, _ = slice(where[1], where[2]).indices(shape_of(node)[dim])
    return (dim, low, high) if high > low and where[3] == 1 else None


def _to_cat(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, dim: int, low: int, high: int) -> None:
    base, source = node.args[:2]
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
    size = shape_of(node)[dim]
    with graph.inserting_before(node):
        if node.target is aten.select_scatter.default:
            source = add_call(graph, mode, aten.unsqueeze.default, (source, dim), like=node)
        parts = [source]
        if low > 0:
            parts.insert(0, add_call(graph, mode, aten.slice.Tensor, (base, dim, 0, low), like=node))
        if high < size:
            parts.append(add_call(graph, mode, aten.slice.Tensor, (base, dim, high, size), like=node))
        result = source
        if len(parts) > 1:
            result = add_call(graph, mode, aten.cat.default, (parts, dim), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _to_expand(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node) -> None:
    value = node.args[1]
    assert isinstance(value, fx.Node)
    if dtype_of(value) == dtype_of(node) and shape_of(value) == ():
        _replace(graph, mode, node, value)


def _to_expands(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node) -> None:
    operands = node.args[0]
    assert isinstance(operands, (list, tuple))
    for user in list(node.users):
        source: Any = operands[_as_int(user.args[1])]
        if shape_of(source) == shape_of(user):
            user.replace_all_uses_with(source)
            graph.erase_node(user)
        else:
            _replace(graph, mode, user, source)


def _replace(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, source: fx.Node) -> None:
    with graph.inserting_before(node):
        result = add_call(graph, mode, aten.expand.default, (source, list(shape_of(node))), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _as_int(argument: Any) -> int:
    assert isinstance(argument, int)
    return argument
