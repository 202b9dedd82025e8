"""Evaluate part of a constant subgraph: a few rows of a mask, without making the whole of it.

A mask of global shape (512, 1, 4096, 4096) is a broadcast of something small. ``ConstantEvaluator`` knows
along which dimensions a value provably does not vary (``uniform``), and computes any *box* of a value, one
half-open range per dimension, from the boxes of its operands that the box depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.building import dtype_of, shape_of
from autopar.ir.graph import is_tensor
from autopar.ir.torch_private import TO_COPY, OpOverload

aten = torch.ops.aten

Box = tuple[tuple[int, int], ...]

# Largest tensor that is made on the way, in elements.
MAX_NUMEL = 1 << 26

_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
    aten.new_zeros.default: lambda node: 0,
    aten.ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
    aten.new_ones.default: lambda node: 1,
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.scalar_tensor.default: lambda node: node.args[0],
}
_SCANS = {aten.cumsum.default: 1, aten.diff.default: 2, aten.flip.default: 1}


class TooLarge(Exception):
    """Evaluating would make a tensor of more than ``MAX_NUMEL`` elements."""


@dataclass(slots=True)
class ConstantEvaluator:
    """Evaluates nodes of one graph that depend on nothing but constants."""

    _constant: dict[fx.Node, bool] = field(default_factory=dict)
    _uniform: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    _values: dict[tuple[fx.Node, Box], Tensor] = field(default_factory=dict)

    def is_constant(self, node: fx.Node) -> bool:
        """Whether the value is known: no parameter, step input, unknown buffer or randomness behind it."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._constant:
                stack.pop()
                continue
            waiting = [n for n in top.all_input_nodes if n not in self._constant]
            if waiting and top.op == "call_function":
                stack.extend(waiting)
                continue
            stack.pop()
            if top.op == "placeholder":
                self._constant[top] = "value" in top.meta
            else:
                tags = top.target.tags if isinstance(top.target, OpOverload) else ()
                random = torch.Tag.nondeterministic_seeded in tags
                self._constant[top] = not random and all(self._constant[n] for n in top.all_input_nodes)
        return self._constant[node]

    def uniform(self, node: fx.Node) -> frozenset[int]:
        """Dimensions along which the value provably does not vary; those of size 1 are among them."""
        found = self._uniform.get(node)
        if found is None:
            shape = shape_of(node)
            single = {d for d, size in enumerate(shape) if size == 1}
            found = self._uniform[node] = frozenset(single | self._find_uniform(node, shape))
        return found

    def _find_uniform(self, node: fx.Node, shape: tuple[int, ...]) -> set[int]:
        target, rank = node.target, len(shape)
        if target in _FILLED:
            return set(range(rank))
        if target is aten.index.Tensor and _leading_indices(node):
            return self._uniform_index(node, rank)
        if target in _SCANS:
            source, dim = node.args[0], _scan_dim(node, rank)
            others = [n for n in node.all_input_nodes if is_tensor(n)]
            assert isinstance(source, fx.Node)
            common = set.intersection(*(set(self.uniform(n)) for n in others))
            return common - {dim}
        if is_pointwise(node):
            return self._uniform_broadcast([n for n in node.all_input_nodes if is_tensor(n)], rank)
        mapping = source_dims(node)
        if mapping is None:
            return set()
        source = node.args[0]
        assert isinstance(source, fx.Node)
        inner, sizes = self.uniform(source), shape_of(source)
        return {d for d, s in enumerate(mapping) if s is None or s in inner or sizes[s] == 1}

    def _uniform_broadcast(self, operands: list[fx.Node], rank: int) -> set[int]:
        """Dimensions of a broadcast of operands to ``rank`` dimensions along which none of them varies."""
        missing = [rank - len(shape_of(n)) for n in operands]
        return {
            d
            for d in range(rank)
            if all(d < m or d - m in self.uniform(n) for n, m in zip(operands, missing, strict=True))
        }

    def _uniform_index(self, node: fx.Node, rank: int) -> set[int]:
        source, indices = node.args[0], _leading_indices(node)
        assert isinstance(source, fx.Node)
        inner = self.uniform(source)
        width = max(len(shape_of(i)) for i in indices)
        relevant = [i for d, i in enumerate(indices) if d not in inner]
        common = self._uniform_broadcast(relevant, width)
        rest = {d - len(indices) + width for d in inner if d >= len(indices)}
        return common | {d for d in rest if d < rank}

    def evaluate(self, node: fx.Node, box: Box | None = None) -> Tensor:
        """The values in ``box``, or all of them. Raises TooLarge."""
        shape = shape_of(node)
        box = tuple((0, size) for size in shape) if box is None else box
        key = (node, box)
        if key not in self._values:
            if prod(high - low for low, high in box) > MAX_NUMEL:
                raise TooLarge
            value = self._compute(node, box, shape)
            if value.numel() > 1 << 16:
                return value  # cheap to make again, costly to keep
            # A box of a long range is a view that would keep all of the range.
            self._values[key] = value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        return self._values[key]

    def _compute(self, node: fx.Node, box: Box, shape: tuple[int, ...]) -> Tensor:
        target = node.target
        if node.op == "placeholder":
            return _narrowed(node.meta["value"].detach().cpu(), box, shape)
        if target in _FILLED:
            filler = _FILLED[target](node)
            if isinstance(filler, (int, float, bool)):
                return torch.full([high - low for low, high in box], filler, dtype=dtype_of(node))
        if is_pointwise(node):
            return self._call(node, lambda n: self.evaluate(n, _aligned(box, shape_of(n))))
        if target is aten.index.Tensor and _leading_indices(node):
            return self._compute_index(node, box)
        if target in _SCANS:
            dim = _scan_dim(node, len(shape))
            return self._call(node, lambda n: self.evaluate(n, _whole_along(box, dim, shape_of(n)))).narrow(
                dim, box[dim][0], box[dim][1] - box[dim][0]
            )
        mapping = source_dims(node)
        if mapping is not None:
            return self._compute_view(node, box, mapping)
        if prod(shape) > MAX_NUMEL:
            raise TooLarge
        return _narrowed(self._call(node, self.evaluate), box, shape)

    def _compute_view(self, node: fx.Node, box: Box, mapping: tuple[int | None, ...]) -> Tensor:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        sizes = shape_of(source)
        wanted = [(0, size) for size in sizes]
        for d, s in enumerate(mapping):
            if s is not None and sizes[s] > 1:
                wanted[s] = box[d]
        if node.target is aten.slice.Tensor:
            dim, start = _slice_start(node, sizes)
            wanted[dim] = (wanted[dim][0] + start, wanted[dim][1] + start)
        elif node.target is aten.select.int:
            dim, position = _as_int(node.args[1]) % len(sizes), _as_int(node.args[2])
            position %= sizes[dim]
            wanted[dim] = (position, position + 1)
        value = self.evaluate(source, tuple(wanted))
        kept = [s for s in mapping if s is not None]
        dropped = [d for d in range(len(sizes)) if d not in kept]
        value = value.permute(*kept, *dropped).reshape([value.shape[s] for s in kept])
        for d, s in enumerate(mapping):
            if s is None:
                value = value.unsqueeze(d)
        return value.expand([high - low for low, high in box])

    def _compute_index(self, node: fx.Node, box: Box) -> Tensor:
        source, indices = node.args[0], _leading_indices(node)
        assert isinstance(source, fx.Node)
        sizes = shape_of(source)
        width = max(len(shape_of(i)) for i in indices)
        chosen = [self.evaluate(i, _aligned(box[:width], shape_of(i))) for i in indices]
        wanted = []
        for d, values in enumerate(chosen):
            low = int(values.min()) if values.numel() else 0
            high = int(values.max()) + 1 if values.numel() else 1
            if values.dtype == torch.bool or low < 0:
                raise TooLarge
            wanted.append((low, high) if d not in self.uniform(source) else (0, 1))
            chosen[d] = values - low if d not in self.uniform(source) else torch.zeros_like(values)
        rest = [box[width + d - len(indices)] for d in range(len(indices), len(sizes))]
        value = self.evaluate(source, (*wanted, *rest))
        return value[tuple(chosen)].expand([high - low for low, high in box])

    def _call(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> Tensor:
        def value(n: fx.Node) -> Any:
            return operand(n) if is_tensor(n) else n.meta["val"]

        assert callable(node.target)
        args = fx.node.map_arg(node.args, value)
        result = node.target(*args, **fx.node.map_arg(dict(node.kwargs), value))
        if not isinstance(result, Tensor):
            raise TooLarge
        return result


def is_pointwise(node: fx.Node) -> bool:
    """Whether an op computes each element of its result from the elements at the same place of its operands."""
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target in _POINTWISE_WITHOUT_TAG)


_POINTWISE_WITHOUT_TAG = {
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.masked_fill.Scalar,
    TO_COPY,
    aten.floor_divide.default,
    aten.min.other,
    aten.max.other,
}


def source_dims(node: fx.Node) -> tuple[int | None, ...] | None:
    """For views that keep dimensions whole: the operand's dimension behind each dimension of the result."""
    if not node.args or not isinstance(node.args[0], fx.Node) or not is_tensor(node.args[0]):
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    target = node.target
    if target is aten.unsqueeze.default:
        dim = _as_int(node.args[1]) % len(after)
        return tuple(None if d == dim else d - (d > dim) for d in range(len(after)))
    if target is aten.expand.default:
        shift = len(after) - len(before)
        return tuple(None if d < shift else d - shift for d in range(len(after)))
    if target in (aten.transpose.int, aten.permute.default):
        order = list(range(len(before)))
        if target is aten.permute.default:
            assert isinstance(node.args[1], (list, tuple))
            order = [_as_int(d) % len(before) for d in node.args[1]]
        else:
            a, b = (_as_int(d) % len(before) for d in node.args[1:3])
            order[a], order[b] = order[b], order[a]
        return tuple(order)
    if target is aten.slice.Tensor:
        step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
        return tuple(range(len(before))) if step == 1 else None
    if target is aten.select.int:
        dim = _as_int(node.args[1]) % len(before)
        return tuple(d + (d >= dim) for d in range(len(after)))
    if target in (aten.reshape.default, aten.squeeze.dim, aten.squeeze.default):
        return _ones_moved(before, after)
    return None


def _ones_moved(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """Dimension map of a reshape that only adds or removes dimensions of size 1."""
    kept = [d for d, size in enumerate(before) if size != 1]
    if [before[d] for d in kept] != [size for size in after if size != 1]:
        return None
    supply = iter(kept)
    return tuple(None if size == 1 else next(supply) for size in after)


def _slice_start(node: fx.Node, sizes: tuple[int, ...]) -> tuple[int, int]:
    dim = _as_int(node.args[1]) if len(node.args) > 1 else 0
    start = node.args[2] if len(node.args) > 2 else 0
    dim %= len(sizes)
    start = 0 if start is None else _as_int(start)
    return dim, min(max(start + sizes[dim] if start < 0 else start, 0), sizes[dim])


def _scan_dim(node: fx.Node, rank: int) -> int:
    position = _SCANS[node.target]  # type: ignore[index]
    dim = node.args[position] if len(node.args) > position else -1
    if isinstance(dim, (list, tuple)):
        dim = dim[0]
    return _as_int(dim) % rank


def _leading_indices(node: fx.Node) -> list[fx.Node]:
    """Index tensors of ``index.Tensor`` if they index the first dimensions, without gaps."""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    nodes = [i for i in indices if isinstance(i, fx.Node)]
    return nodes if len(nodes) == len(indices) else []


def _aligned(box: Box, shape: tuple[int, ...]) -> Box:
    """The part of an operand that a box of a broadcast result needs."""
    tail = box[len(box) - len(shape) :]
    return tuple((0, 1) if size == 1 else span for span, size in zip(tail, shape, strict=True))


def _whole_along(box: Box, dim: int, shape: tuple[int, ...]) -> Box:
    return tuple((0, size) if d == dim or size == 1 else box[d] for d, size in enumerate(shape))


def _narrowed(value: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
    for d, (low, high) in enumerate(box):
        if (low, high) != (0, shape[d]):
            value = value.narrow(d, low, high - low)
    return value


def _as_int(argument: Any) -> int:
    assert isinstance(argument, int)
    return argument
