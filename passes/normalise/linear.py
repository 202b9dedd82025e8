"""Matrix products on flattened rows become ``aten.linear`` on all dimensions.

    y = addmm(bias, reshape(x, [B * S, K]), w)            y = linear(x, transpose(w), bias)
    reshape(y, [B, S, N])                                 y

A merged batch-and-sequence dimension could be split along the batch only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.passes.pipeline import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class UnflattenLinear(Pass):
    """Products of a tensor with a matrix, as linear layers over all leading dimensions."""

    name: ClassVar[str] = "unflatten-linear"

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        transposes: dict[fx.Node, fx.Node] = {}
        for node in list(call_nodes(graph)):
            found = _product(node)
            if found is not None:
                _rewrite(graph, mode, node, *found, transposes)
        return captured


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, Any, bool] | None:
    """(x, matrix, bias, whether the matrix is (in, out)) of an op that is a linear layer."""
    args = node.args
    if node.target is aten.linear.default:
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else None
        return (x, weight, bias, False) if _is_flat(x) else None  # type: ignore[return-value]
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = args
        if isinstance(bias, fx.Node) and shape_of(bias) == shape_of(node)[-1:]:
            return x, weight, bias, True  # type: ignore[return-value]
    if node.target is aten.mm.default and _is_flat(args[0]):
        return args[0], args[1], None, True  # type: ignore[return-value]
    return None


def _is_flat(x: object) -> bool:
    if not isinstance(x, fx.Node) or x.target is not aten.reshape.default or len(shape_of(x)) != 2:
        return False
    assert isinstance(x.args[0], fx.Node)
    return len(shape_of(x.args[0])) > 2 and shape_of(x.args[0])[-1] == shape_of(x)[-1]


def _rewrite(
    graph: fx.Graph,
    mode: FakeTensorMode,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: Any,
    transposed: bool,
    transposes: dict[fx.Node, fx.Node],
) -> None:
    flat = shape_of(node)
    if _is_flat(x):
        x = x.args[0]  # type: ignore[assignment]
    with graph.inserting_before(node):
        if transposed:
            if weight not in transposes:
                transposes[weight] = add_call(graph, mode, aten.transpose.int, (weight, 0, 1), like=node)
            weight = transposes[weight]
        args = (x, weight) if bias is None else (x, weight, bias)
        result = add_call(graph, mode, aten.linear.default, args, like=node)
        if shape_of(result) != flat:
            result = add_call(graph, mode, aten.reshape.default, (result, list(flat)), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
