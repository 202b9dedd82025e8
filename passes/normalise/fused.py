"""Several linear layers in one become several.

    y = linear(x, w, b)                         w_0 = w[0:h], w_1 = w[h:3 h]: placeholders of their own
    q, kv = split(y, [h, 2 * h], -1)            q, kv = linear(x, w_0, b_0), linear(x, w_1, b_1)

    z = permute(reshape(linear(x, w), [B, S, 3, N, D]), [2, 0, 3, 1, 4])
    q, k, v = unbind(z)                         q = permute(reshape(linear(x, w_0), [B, S, 1, N, D]), ..)[0], ..

A fused projection to queries, keys and values, or to a gate and a value, would have to be cut into scattered pieces
to put whole heads on a rank; apart, each part is cut into one. The model's parameter is stored as its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, Parameter, call_nodes
from autopar.ir.ops.composite import columns_linear
from autopar.ir.torch_private import FakeTensorMode
from autopar.passes.contract import Pass
from autopar.passes.normalise.constants import source_dims

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitFusedLinear(Pass[CapturedModel]):
    """One linear layer for each piece of the result that is used by itself."""

    name: ClassVar[str] = "split-fused-linear"
    requires: ClassVar[frozenset[str]] = frozenset({"linear layers"})
    provides: ClassVar[frozenset[str]] = frozenset({"layers apart"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        mode = fake_mode_of(captured.graph)
        pieces: dict[str, list[fx.Node]] = {}
        for node in list(call_nodes(captured.graph)):
            found = _match(node, captured) if node.target in _OUTPUTS else None
            if found is not None:
                pieces.update(_rewrite(captured, mode, node, found))
        parameters: dict[str, Parameter] = {}
        for name, parameter in captured.parameters.items():
            if name not in pieces:
                parameters[name] = parameter
            for new in pieces.get(name, ()):
                parameters[new.name] = parameter.piece(*new.meta.pop("piece"))
        return replace(captured, parameters=parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A piece of a layer's outputs.

    start, stop: outputs. views: what was done to the outputs before they were taken apart, with the dimension that they
    were taken apart in, after each view. selected: whether that dimension went.
    """

    start: int
    stop: int
    views: tuple[tuple[fx.Node, int], ...]
    selected: bool


@dataclass(frozen=True, slots=True)
class _Fused:
    uses: dict[fx.Node, _Use]
    matrix: fx.Node
    bias: fx.Node | None


def _match(node: fx.Node, captured: CapturedModel) -> _Fused | None:
    uses: dict[fx.Node, _Use] = {}
    whole = _collect(node, len(shape_of(node)) - 1, shape_of(node)[-1], (), uses)
    spans = sorted({(use.start, use.stop) for use in uses.values()})
    if not whole or len(spans) < 2 or (spans[0][0], spans[-1][1]) != (0, shape_of(node)[-1]):
        return None
    if any(start == stop for start, stop in spans):
        return None
    if any(before[1] != after[0] for before, after in pairwise(spans)):
        return None
    matrix = node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None
    for operand in (matrix, bias):
        if isinstance(operand, fx.Node) and (operand.name not in captured.parameters or len(operand.users) != 1):
            return None
    assert isinstance(matrix, fx.Node) and (bias is None or isinstance(bias, fx.Node))
    return _Fused(uses, matrix, bias)


def _collect(
    node: fx.Node, dim: int, outputs: int, views: tuple[tuple[fx.Node, int], ...], uses: dict[fx.Node, _Use]
) -> bool:
    """Find the pieces into which dimension ``dim`` of a tensor, which holds all ``outputs``, is taken apart.

    Returns whether nothing else is done to the tensor.
    """
    if not node.users:
        return False
    each = outputs // shape_of(node)[dim]
    for user in node.users:
        found = _pieces(user, dim)
        for piece, (start, stop) in (found or {}).items():
            selected = user.target in (aten.select.int, aten.unbind.int)
            uses[piece] = _Use(start=start * each, stop=stop * each, views=views, selected=selected)
        if found is None:
            after = _dim_after(user, dim, outputs)
            if after is None or not _collect(user, after, outputs, (*views, (user, after)), uses):
                return False
    return True


def _pieces(user: fx.Node, dim: int) -> dict[fx.Node, tuple[int, int]] | None:
    """The results of an op that takes dimension ``dim`` of its operand apart, with the start and stop of each."""
    source = user.args[0]
    if not isinstance(source, fx.Node) or user.target not in _CUTS:
        return None
    size, rank = shape_of(source)[dim], len(shape_of(source))
    place = _CUTS[user.target]
    along = user.args[place] if len(user.args) > place else user.kwargs.get("dim", 0)
    if not isinstance(along, int) or along % rank != dim:
        return None
    if user.target is aten.select.int:
        number = user.args[2]
        assert isinstance(number, int)
        return {user: (number % size, number % size + 1)}
    if user.target is aten.slice.Tensor:
        arguments: tuple[Any, ...] = (*user.args[2:], *(0, None, 1)[len(user.args) - 2 :])
        start, _, step = arguments
        first, length = slice(start, None).indices(size)[0], shape_of(user)[dim]
        return {user: (first, first + length)} if step == 1 else None
    ends = [0]
    for part in user.meta["val"]:
        ends.append(ends[-1] + (1 if user.target is aten.unbind.int else part.shape[dim]))
    items = {item: item.args[1] for item in user.users}
    return {item: (ends[number], ends[number + 1]) for item, number in items.items()}  # type: ignore[index, operator]


def _dim_after(view: fx.Node, dim: int, outputs: int) -> int | None:
    """Where a view has the dimension, or the outermost part of it where the view takes the outputs apart."""
    source = view.args[0] if view.args else None
    if not isinstance(source, fx.Node) or view.target not in _MOVES:
        return None
    before, after = shape_of(source), shape_of(view)
    if view.target is aten.reshape.default and before[dim] == outputs and dim == len(before) - 1:
        inner = 1
        for place in range(len(after) - 1, -1, -1):
            inner *= after[place]
            if inner == outputs and after[place] > 1:
                return place
        return None
    places = source_dims(view)
    return places.index(dim) if places is not None and dim in places else None


# Ops that take a dimension apart, and the position of their dimension argument.
_CUTS: dict[Any, int] = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.unbind.int: 1,
}
# Views after which the dimension is still there.
_RESHAPES = (aten.reshape.default, aten.squeeze.default, aten.squeeze.dim)
_MOVES = (*_RESHAPES, aten.unsqueeze.default, aten.transpose.int, aten.permute.default)
# Linear layers, and the dimension of their matrix that makes outputs.
_OUTPUTS: dict[Any, int] = {aten.linear.default: 0, columns_linear: 1}


def _rewrite(captured: CapturedModel, mode: FakeTensorMode, node: fx.Node, found: _Fused) -> dict[str, list[fx.Node]]:
    """Replace the layer. Returns the new placeholders of each parameter, with their place in ``meta["piece"]``."""
    graph, layer = captured.graph, node.target
    assert callable(layer)
    spans = sorted({(use.start, use.stop) for use in found.uses.values()})
    matrices = _placeholders(graph, mode, found.matrix, _OUTPUTS[layer], spans)
    biases = [] if found.bias is None else _placeholders(graph, mode, found.bias, 0, spans)
    outputs = shape_of(node)[-1]
    for number, span in enumerate(spans):
        with graph.inserting_before(node):
            args = (node.args[0], matrices[number], *biases[number : number + 1])
            part = add_call(graph, mode, layer, args, like=node)
            for user, use in found.uses.items():
                if (use.start, use.stop) == span:
                    user.replace_all_uses_with(_viewed(graph, mode, part, use, outputs))
    for user in found.uses:
        _erase_up_to(graph, user, node)
    graph.erase_node(node)
    made = {found.matrix.name: matrices}
    graph.erase_node(found.matrix)
    if found.bias is not None:
        made[found.bias.name] = biases
        graph.erase_node(found.bias)
    return made


def _viewed(graph: fx.Graph, mode: FakeTensorMode, part: fx.Node, use: _Use, outputs: int) -> fx.Node:
    """What was done to all outputs, done to a part of them."""
    dim = len(shape_of(part)) - 1
    for view, after in use.views:
        if view.target in _RESHAPES:
            sizes = list(shape_of(view))
            sizes[after] = sizes[after] * (use.stop - use.start) // outputs
            part = add_call(graph, mode, aten.reshape.default, (part, sizes), like=view)
        else:
            assert callable(view.target)
            part = add_call(graph, mode, view.target, (part, *view.args[1:]), dict(view.kwargs), like=view)
        dim = after
    return add_call(graph, mode, aten.select.int, (part, dim, 0), like=part) if use.selected else part


def _erase_up_to(graph: fx.Graph, node: fx.Node, end: fx.Node) -> None:
    """Erase ops without users, from ``node`` back to ``end``, which stays."""
    while node is not end and not node.users:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        graph.erase_node(node)
        node = source


def _placeholders(
    graph: fx.Graph, mode: FakeTensorMode, whole: fx.Node, dim: int, spans: Sequence[tuple[int, int]]
) -> list[fx.Node]:
    """Pieces of a parameter as parameters of their own, in its place."""
    made = []
    for number, (start, stop) in enumerate(spans):
        with graph.inserting_before(whole), mode:
            piece = graph.placeholder(f"{whole.name}_piece_{number}")
            value = whole.meta["val"]
            size = [*value.shape[:dim], stop - start, *value.shape[dim + 1 :]]
            piece.meta.update(whole.meta)
            piece.meta["val"] = value.new_empty(size)
        piece.meta["piece"] = (dim, start, stop)
        made.append(piece)
    return made
