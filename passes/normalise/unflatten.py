"""Ops on rows move above the view that merged batch and sequence into rows.

    softmax(linear(reshape(x, [B * S, K]), w), 1)         reshape(softmax(linear(x, w), -1), [B * S, N])

A merged dimension could be split along the batch only, and not even along that where the sequence comes first; two can
be split along either. The view ends where rows are mixed, and meets the view that undoes it in most models. A view that
merges columns too, as heads of an attention, is two views first:

    reshape(x, [S * B, H * D])                            reshape(reshape(x, [S, B, H * D]), [S * B, H * D])
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes, is_tensor
from autopar.ir.ops.composite import columns_linear
from autopar.ir.torch_private import FakeTensorMode
from autopar.passes.contract import Pass
from autopar.passes.normalise.constants import is_pointwise

aten = torch.ops.aten

# Ops that work on the rows of their first operand, and the position of their dimension argument, if any.
_ROW_OPS: dict[Any, int | None] = {
    aten.linear.default: None,
    columns_linear: None,
    aten.softmax.int: 1,
    aten.log_softmax.int: 1,
    aten.topk.default: 2,
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.layer_norm.default: None,
}


@dataclass(frozen=True)
class Unflatten(Pass[CapturedModel]):
    """Row-wise ops on all leading dimensions instead of on merged ones."""

    name: ClassVar[str] = "unflatten"
    requires: ClassVar[frozenset[str]] = frozenset({"linear layers", "picks as gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"rows apart"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            _in_two(graph, mode, node)
        for node in list(call_nodes(graph)):
            lead = _lead(node)
            if lead is not None:
                _rewrite(graph, mode, node, lead)
        return captured


def _in_two(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node) -> None:
    """Merge columns first, then rows, where one view merges both."""
    if node.target is not aten.reshape.default or len(shape_of(node)) != 2:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    lead = _leading(shape_of(source), shape_of(node)[0])
    if len(lead) > 1 and shape_of(source) != (*lead, shape_of(node)[1]):
        with graph.inserting_before(node):
            merged = add_call(graph, mode, aten.reshape.default, (source, [*lead, shape_of(node)[1]]), like=node)
        node.args = (merged, *node.args[1:])


def _leading(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Leading sizes of ``shape``, the last perhaps a part of one, whose product is ``rows``; () if there are none."""
    lead: list[int] = []
    for size in shape:
        left = rows // prod(lead)
        if size % left == 0:
            return (*lead, left)
        if left % size:
            break
        lead.append(size)
    return ()


def before_flatten(node: object) -> fx.Node | None:
    """x (.., K), if the node is ``reshape(x, [N, K])`` with at least two dimensions merged into N."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default or len(shape_of(node)) != 2:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = shape_of(source)
    return source if len(shape) > 2 and shape[-1] == shape_of(node)[-1] else None


def _lead(node: fx.Node) -> tuple[int, ...] | None:
    """Leading sizes that an op could be done on instead of on their product, if it can."""
    operands = [a for a in node.args if isinstance(a, fx.Node) and is_tensor(a)]
    if is_pointwise(node):
        flat = [a for a in operands if before_flatten(a) is not None]
        others = [a for a in operands if a not in flat and prod(shape_of(a)[:-1]) != 1]
    elif node.target in _ROW_OPS and _is_last(node, _ROW_OPS[node.target]):
        flat = [a for a in operands[:1] if before_flatten(a) is not None]
        others = []
    else:
        return None
    leads = {shape_of(before_flatten(a))[:-1] for a in flat}  # type: ignore[arg-type]
    if others or len(leads) != 1 or node.kwargs.get("out") is not None:
        return None
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    lead = next(iter(leads))
    return lead if all(r.dim() == 2 and r.shape[0] == prod(lead) for r in results) else None


def _is_last(node: fx.Node, position: int | None) -> bool:
    """Whether the op's dimension argument names the last dimension of two."""
    if position is None:
        return True
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", -1)
    return dim in (1, -1) or (isinstance(dim, (list, tuple)) and list(dim) in ([1], [-1]))


def _rewrite(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, lead: tuple[int, ...]) -> None:
    args: list[Any] = list(node.args)
    for number, argument in enumerate(args if is_pointwise(node) else args[:1]):
        source = before_flatten(argument)
        if source is not None and shape_of(source)[:-1] == lead:
            args[number] = source
    position = _ROW_OPS.get(node.target)
    if position is not None and len(args) > position:
        args[position] = [-1] if isinstance(args[position], (list, tuple)) else -1
    with graph.inserting_before(node):
        assert callable(node.target)
        result = add_call(graph, mode, node.target, tuple(args), dict(node.kwargs), like=node)
        if not isinstance(node.meta["val"], (tuple, list)):
            flat = add_call(graph, mode, aten.reshape.default, (result, list(shape_of(node))), like=node)
            node.replace_all_uses_with(flat)
    if isinstance(node.meta["val"], (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem
            with graph.inserting_before(user):
                part = add_call(graph, mode, operator.getitem, (result, user.args[1]), like=user)
                flat = add_call(graph, mode, aten.reshape.default, (part, list(shape_of(user))), like=user)
            user.replace_all_uses_with(flat)
            graph.erase_node(user)
    graph.erase_node(node)
