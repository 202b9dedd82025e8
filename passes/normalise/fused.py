"""Several linear layers in one become several.

    y = linear(x, w, b)                         w_0 = w[0:h], w_1 = w[h:3 h]: placeholders of their own
    q, kv = split(y, [h, 2 * h], -1)            q, kv = linear(x, w_0, b_0), linear(x, w_1, b_1)

A fused projection to queries, keys and values, or to a gate and a value, would have to be cut into scattered pieces
to put whole heads on a rank; apart, each part is cut into one. The model's parameter is stored as its pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, Parameter, call_nodes
from autopar.ir.ops import columns_linear
from autopar.passes.pipeline import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitFusedLinear(Pass):
    """One linear layer for each piece of the result that is used by itself."""

    name: ClassVar[str] = "split-fused-linear"

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


@dataclass(frozen=True, slots=True)
class _Fused:
    """uses: node of each piece -> its start and stop."""

    uses: dict[fx.Node, tuple[int, int]]
    matrix: fx.Node
    bias: fx.Node | None


def _match(node: fx.Node, captured: CapturedModel) -> _Fused | None:
    uses = _pieces(node)
    if uses is None:
        return None
    matrix = node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None
    for operand in (matrix, bias):
        if isinstance(operand, fx.Node) and (operand.name not in captured.parameters or len(operand.users) != 1):
            return None
    assert isinstance(matrix, fx.Node) and (bias is None or isinstance(bias, fx.Node))
    return _Fused(uses, matrix, bias)


def _pieces(node: fx.Node) -> dict[fx.Node, tuple[int, int]] | None:
    """The users of a tensor, if they are pieces of its last dimension that make up the whole."""
    last, size = len(shape_of(node)) - 1, shape_of(node)[-1]
    uses: dict[fx.Node, tuple[int, int]] = {}
    for user in node.users:
        dim = user.args[2] if user.target in _SPLITS and len(user.args) > 2 else 0
        if user.target in _SPLITS and dim in (-1, last):
            ends = [0]
            for part in user.meta["val"]:
                ends.append(ends[-1] + part.shape[-1])
            for item in user.users:
                number = item.args[1]
                assert item.target is operator.getitem and isinstance(number, int)
                uses[item] = (ends[number], ends[number + 1])
        elif user.target is aten.slice.Tensor and len(user.args) > 1 and user.args[1] in (-1, last):
            start = user.args[2] if len(user.args) > 2 and user.args[2] is not None else 0
            assert isinstance(start, int)
            start = max(0, start + size if start < 0 else start)
            length = shape_of(user)[-1]
            if len(user.args) > 4 and user.args[4] != 1:
                return None
            uses[user] = (start, start + length)
        else:
            return None
    spans = sorted(set(uses.values()))
    whole = spans and spans[0][0] == 0 and spans[-1][1] == size
    adjoin = all(before[1] == after[0] for before, after in pairwise(spans))
    return uses if len(spans) > 1 and whole and adjoin else None


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
# Linear layers, and the dimension of their matrix that makes outputs.
_OUTPUTS: dict[Any, int] = {aten.linear.default: 0, columns_linear: 1}


def _rewrite(captured: CapturedModel, mode: FakeTensorMode, node: fx.Node, found: _Fused) -> dict[str, list[fx.Node]]:
    """Replace the layer. Returns the new placeholders of each parameter, with their place in ``meta["piece"]``."""
    graph, layer = captured.graph, node.target
    assert callable(layer)
    spans = sorted(set(found.uses.values()))
    matrices = _placeholders(graph, mode, found.matrix, _OUTPUTS[layer], spans)
    biases = [] if found.bias is None else _placeholders(graph, mode, found.bias, 0, spans)
    for number, span in enumerate(spans):
        with graph.inserting_before(node):
            args = (node.args[0], matrices[number], *biases[number : number + 1])
            part = add_call(graph, mode, layer, args, like=node)
        for user, own in found.uses.items():
            if own == span:
                user.replace_all_uses_with(part)
    for user in found.uses:
        whole = user.args[0]
        graph.erase_node(user)
        if isinstance(whole, fx.Node) and whole is not node and not whole.users:
            graph.erase_node(whole)
    graph.erase_node(node)
    made = {found.matrix.name: matrices}
    graph.erase_node(found.matrix)
    if found.bias is not None:
        made[found.bias.name] = biases
        graph.erase_node(found.bias)
    return made


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
