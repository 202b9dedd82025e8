"""Ops on rows move above the view that merged batch and sequence into rows.

    softmax(linear(reshape(x, [B * S, K]), w), 1)         reshape(softmax(linear(x, w), -1), [B * S, N])

A merged dimension could be split along the batch only, and not even along that where the sequence comes first; two can
be split along either. The view ends where rows are mixed, and meets the view that undoes it in most models. A view that
merges columns too, as heads of an attention, is two views first:

    reshape(x, [S * B, H * D])                            reshape(reshape(x, [S, B, H * D]), [S * B, H * D])

One that splits columns, as a router does that scores groups of experts, is two as well, and rows may have several
dimensions then:

    topk(reshape(x (B, S, E), [B * S, G, E / G]), 2)      reshape(topk(reshape(x, [B, S, G, E / G]), 2), [B * S, G, 2])
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
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

# Ops that work on the rows of their first operands, and the position of their dimension argument, if any.
_ROW_OPS: dict[Any, int | None] = {
    aten.linear.default: None,
    columns_linear: None,
    aten.softmax.int: 1,
    aten.log_softmax.int: 1,
    aten.topk.default: 2,
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.layer_norm.default: None,
    aten.gather.default: 1,
    aten.scatter.value: 1,
    aten.unsqueeze.default: 1,
    aten.zeros_like.default: None,
}
# Those whose rows are in two operands, by position; in the others they are in the first alone.
_TWO: dict[Any, tuple[int, ...]] = {aten.gather.default: (0, 2), aten.scatter.value: (0, 2)}
# Views that keep rows apart if their first size is the number of rows.
_VIEWS = (aten.reshape.default, aten.expand.default)


@dataclass(frozen=True)
class Unflatten(Pass[CapturedModel]):
    """Row-wise ops on all leading dimensions instead of on merged ones."""

    name: ClassVar[str] = "unflatten"
    requires: ClassVar[frozenset[str]] = frozenset({"linear layers", "picks as gathers"})
    provides: ClassVar[frozenset[str]] = frozenset({"rows apart"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        rows = _Rows(captured.graph, fake_mode_of(captured.graph))
        for node in list(call_nodes(captured.graph)):
            rows.in_two(node)
        for node in list(call_nodes(captured.graph)):
            found = rows.rows_of(node)
            if found is not None:
                rows.rewrite(node, *found)
        return captured


def before_flatten(node: object) -> fx.Node | None:
    """x (.., K), if the node is ``reshape(x, [N, K])`` with at least two dimensions merged into N."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default or len(shape_of(node)) != 2:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = shape_of(source)
    return source if len(shape) > 2 and shape[-1] == shape_of(node)[-1] else None


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


@dataclass(slots=True)
class _Rows:
    """made: views that this pass has put after an op, which merge the rows of several columns."""

    graph: fx.Graph
    mode: FakeTensorMode
    made: set[fx.Node] = field(default_factory=set)

    def in_two(self, node: fx.Node) -> None:
        """Change columns first, then merge rows, where one view does both."""
        if node.target is not aten.reshape.default or len(shape_of(node)) < 2:
            return
        source, (rows, *columns) = node.args[0], shape_of(node)
        assert isinstance(source, fx.Node)
        shape = shape_of(source)
        lead = _leading(shape, rows)
        # Of more columns only those that were one before: the others may be heads, and sequences.
        split = len(columns) == 1 or (len(shape) == len(lead) + 1 and shape[: len(lead)] == lead)
        if len(lead) > 1 and split and shape != (*lead, *columns):
            with self.graph.inserting_before(node):
                apart = self.call(aten.reshape.default, (source, [*lead, *columns]), like=node)
            node.args = (apart, *node.args[1:])
            if len(columns) > 1:
                self.made.add(node)

    def apart(self, node: object) -> fx.Node | None:
        """The tensor whose rows a view merges."""
        if isinstance(node, fx.Node) and node in self.made:
            assert isinstance(node.args[0], fx.Node)
            return node.args[0]
        return before_flatten(node)

    def sizes(self, node: fx.Node) -> tuple[int, ...]:
        """The sizes that such a view merges."""
        source = self.apart(node)
        assert source is not None
        return shape_of(source)[: len(shape_of(source)) - len(shape_of(node)) + 1]

    def rows_of(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Leading sizes that an op could be done on instead of on their product, and its arguments that are such rows;
        None if it cannot."""
        if is_pointwise(node):
            rank = len(shape_of(node)) if is_tensor(node) else 0
            shapes = {
                place: shape_of(a) for place, a in enumerate(node.args) if isinstance(a, fx.Node) and is_tensor(a)
            }
            # Others are the same for all rows.
            places = [place for place, shape in shapes.items() if len(shape) == rank > 1 and shape[0] != 1]
        elif node.target in _ROW_OPS or node.target in _VIEWS:
            places = list(_TWO.get(node.target, (0,)))
            if not _keeps_rows(node):
                return None
        else:
            return None
        flat = [
            a for a in (node.args[place] for place in places) if isinstance(a, fx.Node) and self.apart(a) is not None
        ]
        if not flat or len(flat) < len(places) or node.kwargs.get("out") is not None:
            return None
        leads = {self.sizes(a) for a in flat}
        results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        lead = next(iter(leads))
        kept = len(leads) == 1 and all(r.dim() >= 2 and r.shape[0] == prod(lead) for r in results)
        return (lead, tuple(places)) if kept else None

    def rewrite(self, node: fx.Node, lead: tuple[int, ...], places: tuple[int, ...]) -> None:
        """The op on all of ``lead``, and then the view."""
        args: list[Any] = list(node.args)
        position = _ROW_OPS.get(node.target)
        if position is not None and len(args) > position:
            dims, rank = args[position], _rank_of_dims(node)
            several = isinstance(dims, (list, tuple))
            found = [dim if dim < 0 else dim - rank for dim in (dims if several else (dims,))]
            args[position] = found if several else found[0]
        for place in places:
            args[place] = self.apart(args[place])
        if node.target in _VIEWS:
            args[1] = [*lead, *shape_of(node)[1:]]
        with self.graph.inserting_before(node):
            assert callable(node.target)
            result = self.call(node.target, tuple(args), dict(node.kwargs), like=node)
            if not isinstance(node.meta["val"], (tuple, list)):
                node.replace_all_uses_with(self.merged(result, node))
        if isinstance(node.meta["val"], (tuple, list)):
            for user in list(node.users):
                assert user.target is operator.getitem
                with self.graph.inserting_before(user):
                    part = self.call(operator.getitem, (result, user.args[1]), like=user)
                    user.replace_all_uses_with(self.merged(part, user))
                self.graph.erase_node(user)
        self.graph.erase_node(node)

    def merged(self, wide: fx.Node, like: fx.Node) -> fx.Node:
        """The view of ``wide`` that has the shape of ``like``."""
        view = self.call(aten.reshape.default, (wide, list(shape_of(like))), like=like)
        if len(shape_of(like)) > 2:
            self.made.add(view)
        return view

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Any = None, *, like: fx.Node) -> fx.Node:
        return add_call(self.graph, self.mode, target, args, kwargs or {}, like=like)


def _rank_of_dims(node: fx.Node) -> int:
    """Number of dimensions of the tensor whose dimension an op names: of the result, where that has one more."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return len(shape_of(operand)) + (node.target is aten.unsqueeze.default)


def _keeps_rows(node: fx.Node) -> bool:
    """Whether an op on rows of its first operand leaves them where they are, and apart."""
    if node.target in _VIEWS:
        return node.target is aten.reshape.default or _rank_of_dims(node) == len(shape_of(node))
    position = _ROW_OPS[node.target]
    if position is None:
        return True
    if "dim" in node.kwargs:
        return bool(node.kwargs["dim"] == -1)
    dims = node.args[position] if len(node.args) > position else -1
    every = dims if isinstance(dims, (list, tuple)) else (dims,)
    rank = _rank_of_dims(node)
    return bool(every) and all(isinstance(dim, int) and dim % rank != 0 for dim in every)
