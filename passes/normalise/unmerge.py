"""Products over merged batch and heads become products over both.

    scores = baddbmm(bias, reshape(q, [B * H, S, D]), reshape(k, [B * H, D, T]), beta=1, alpha=0.5)
    softmax(scores, -1)                 reshape(softmax(add(mul(matmul(q, k), 0.5), bias'), -1), [B * H, S, T])

A merged dimension could be divided along the batch only; two can be divided along either. As with rows
(``unflatten.py``) the view that merges moves down, past what is done to the scores, and meets the view that undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, only_user, shape_of
from autopar.ir.graph import CapturedModel, call_nodes, is_tensor
from autopar.ir.rules.factors import Factors
from autopar.ir.rules.views import refine
from autopar.ir.torch_private import FakeTensorMode, OpOverload
from autopar.passes.contract import Pass
from autopar.passes.normalise.constants import is_pointwise, source_dims

aten = torch.ops.aten

_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
_ORDERS = (aten.transpose.int, aten.permute.default)
# Ops along one dimension, with the position of their dimension argument; None: element by element.
_ALONG: dict[Any, int | None] = {
    aten.softmax.int: 1,
    aten.log_softmax.int: 1,
    aten.gather.default: 1,
    aten.dropout.default: None,
}
_Sizes = tuple[int, ...]


@dataclass(frozen=True)
class UnmergeProducts(Pass[CapturedModel]):
    """Batched matrix products on all batch dimensions instead of on merged ones."""

    name: ClassVar[str] = "unmerge-products"
    provides: ClassVar[frozenset[str]] = frozenset({"heads apart"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"joined views"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        unmerger = _Unmerger(captured.graph, fake_mode_of(captured.graph))
        for node in list(call_nodes(captured.graph)):
            unmerger.visit(node)
        return captured


@dataclass(slots=True)
class _Unmerger:
    """merged: views that this pass has put after an op, with the sizes that they merge into dimension 0."""

    graph: fx.Graph
    mode: FakeTensorMode
    merged: dict[fx.Node, _Sizes] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        if not is_tensor(node) or node.kwargs.get("out") is not None or not shape_of(node):
            return
        if node.target in _PRODUCTS:
            x, y = node.args[-2:]
            assert isinstance(x, fx.Node) and isinstance(y, fx.Node)
            sizes = self.merged_sizes(x, 0)
            if sizes is not None and sizes == self.merged_sizes(y, 0):
                self.product(node, sizes)
        elif not self.merged.keys().isdisjoint(node.all_input_nodes) and self.moves_past(node):
            sizes = next(self.merged[n] for n in node.all_input_nodes if n in self.merged)
            self.other(node, sizes)

    def merged_sizes(self, node: fx.Node, dim: int) -> _Sizes | None:
        """The sizes that a view merges into dimension ``dim`` of a tensor, if it can be taken apart for nothing."""
        if node.op != "call_function" or shape_of(node)[dim] == 1:
            return None
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        if node.target is aten.reshape.default:
            factors = Factors()
            pair = refine(factors, shape_of(source), shape_of(node))
            sizes = tuple(factors.sizes[f] for f in pair[1][dim]) if pair is not None else ()
            return sizes if len(sizes) > 1 else None
        if node.target is aten.repeat.default:
            own, times = shape_of(source), node.args[1]
            assert isinstance(times, (list, tuple))
            if len(own) == len(times) and own[dim] > 1 and all(t == 1 for d, t in enumerate(times) if d != dim):
                return (times[dim], own[dim])  # type: ignore[return-value]  # repeats are integers
            return None
        if node.target in _ORDERS:
            return self.merged_sizes(source, _order_of(node)[dim])
        if _is_elementwise(node) or _runs_beside(node, dim):
            full = [n for n in node.all_input_nodes if is_tensor(n) and _size_at(n, node, dim) > 1]
            found = {self.merged_sizes(n, len(shape_of(n)) - len(shape_of(node)) + dim) for n in full}
            return found.pop() if len(found) == 1 else None
        return None

    def apart(self, node: fx.Node, dim: int, sizes: _Sizes, like: fx.Node) -> fx.Node:
        """The tensor with dimension ``dim`` as ``sizes``: what a view merged, else a view of it."""
        shape = shape_of(node)
        wide = [*shape[:dim], *sizes, *shape[dim + 1 :]]
        if self.merged_sizes(node, dim) == sizes:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if node.target is aten.repeat.default:
                row = self.call(aten.unsqueeze.default, source, dim, like=like)
                return self.call(aten.expand.default, row, wide, like=like)
            if node.target in _ORDERS:
                order = _order_of(node)
                return self.reordered(self.apart(source, order[dim], sizes, like), order, order[dim], sizes, like)
            if _is_elementwise(node) or _runs_beside(node, dim):
                return self.pointwise(node, dim, sizes, like)
            node = source
        elif node.target is aten.expand.default and _size_at(node.args[0], node, dim) == 1:
            return self.call(aten.expand.default, self.broadcast(node.args[0], node, dim, sizes, like), wide, like=like)
        return self.call(aten.reshape.default, node, wide, like=like)

    def reordered(self, node: fx.Node, order: _Sizes, dim: int, sizes: _Sizes, like: fx.Node) -> fx.Node:
        """``node``, of which dimension ``dim`` is apart, with its dimensions in ``order``."""
        new: list[int] = []
        for place in order:
            first = place if place <= dim else place + len(sizes) - 1
            new.extend(range(first, first + len(sizes)) if place == dim else [first])
        return self.call(aten.permute.default, node, new, like=like)

    def broadcast(self, operand: Any, node: fx.Node, dim: int, sizes: _Sizes, like: fx.Node) -> Any:
        """An operand of ``node``, broadcast to it, for the op with dimension ``dim`` of its result as ``sizes``."""
        if not isinstance(operand, fx.Node) or not is_tensor(operand):
            return operand
        shape = shape_of(operand)
        own = len(shape) - len(shape_of(node)) + dim
        if own < 0:
            return operand
        if shape[own] > 1:
            return self.apart(operand, own, sizes, like)
        return self.call(aten.reshape.default, operand, [*shape[:own], *[1] * len(sizes), *shape[own + 1 :]], like=like)

    def pointwise(self, node: fx.Node, dim: int, sizes: _Sizes, like: fx.Node) -> fx.Node:
        """An op that does the same for each entry of dimension ``dim``, with that dimension as ``sizes``."""
        args = [self.broadcast(a, node, dim, sizes, like) for a in node.args]
        place = _ALONG.get(node.target)
        if place is not None:
            along = args[place]
            args[place] = along if along < 0 else along + len(sizes) - 1
        kwargs = {name: self.broadcast(a, node, dim, sizes, like) for name, a in node.kwargs.items()}
        assert callable(node.target)
        return add_call(self.graph, self.mode, node.target, tuple(args), kwargs, like=node)

    def product(self, node: fx.Node, sizes: _Sizes) -> None:
        with self.graph.inserting_before(node):
            *added, x, y = node.args
            result = self.call(aten.matmul.default, *(self.apart(n, 0, sizes, node) for n in (x, y)), like=node)  # type: ignore[arg-type]
            if added:
                alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
                bias = self.broadcast(added[0], node, 0, sizes, node)
                result = self.call(aten.mul.Tensor, result, alpha, like=node) if alpha != 1 else result
                if beta != 0:
                    bias = self.call(aten.mul.Tensor, bias, beta, like=node) if beta != 1 else bias
                    result = self.call(aten.add.Tensor, result, bias, like=node)
        self.merge(node, result, sizes)

    def moves_past(self, node: fx.Node) -> bool:
        """Whether an op treats dimension 0, merged in some operands, like a batch."""
        rank = len(shape_of(node))
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        sizes = {self.merged[n] for n in operands if n in self.merged}
        if len(sizes) != 1 or any(len(shape_of(n)) != rank for n in operands if n in self.merged):
            return False
        if shape_of(node)[0] != prod(next(iter(sizes))):
            return False
        if node.target in _ORDERS:
            return _order_of(node)[0] == 0
        return _is_elementwise(node) or _runs_beside(node, 0)

    def other(self, node: fx.Node, sizes: _Sizes) -> None:
        with self.graph.inserting_before(node):
            if node.target in _ORDERS:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                result = self.reordered(self.apart(source, 0, sizes, node), _order_of(node), 0, sizes, node)
            else:
                result = self.pointwise(node, 0, sizes, node)
        self.merge(node, result, sizes)

    def merge(self, node: fx.Node, result: fx.Node, sizes: _Sizes) -> None:
        """``result`` in place of ``node``, in its shape."""
        with self.graph.inserting_before(node):
            view = self.call(aten.reshape.default, result, list(shape_of(node)), like=node)
        self.merged[view] = sizes
        node.replace_all_uses_with(view)
        self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, like: fx.Node) -> fx.Node:
        return add_call(self.graph, self.mode, target, args, like=like)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether an op does the same to each element, and draws no random numbers, which depend on the shape."""
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return is_pointwise(node) and torch.Tag.nondeterministic_seeded not in tags


def _runs_beside(node: fx.Node, dim: int) -> bool:
    """Whether an op works along another dimension than ``dim``, of which all operands have as much."""
    if node.target not in _ALONG or (node.target is aten.dropout.default and only_user(node) is None):
        return False
    place, rank = _ALONG[node.target], len(shape_of(node))
    along = None if place is None else node.args[place]
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    alike = all(len(shape_of(n)) == rank and shape_of(n)[dim] == shape_of(node)[dim] for n in operands)
    return alike and (along is None or (isinstance(along, int) and along % rank != dim))


def _order_of(node: fx.Node) -> tuple[int, ...]:
    """The operand's dimension behind each dimension of a transpose or permutation."""
    order = source_dims(node)
    assert order is not None
    return tuple(dim for dim in order if dim is not None)


def _size_at(operand: Any, node: fx.Node, dim: int) -> int:
    """Size of an operand at the dimension that is broadcast to dimension ``dim`` of ``node``."""
    own = len(shape_of(operand)) - len(shape_of(node)) + dim
    return shape_of(operand)[own] if own >= 0 else 1
