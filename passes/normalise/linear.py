"""Products of rows with a matrix become linear layers.

addmm(bias, x, w)                                     columns_linear(x, w, bias)
mm(reshape(x, [B * S, K]), w)                         columns_linear(reshape(x, [B * S, K]), w)
matmul(x (B, S, K), w (K, N))                         columns_linear(x, w)
add(columns_linear(x, w), bias (N))                   columns_linear(x, w, bias)
linear(x, transpose(w), bias)                         columns_linear(x, w, bias)
columns_linear(x, transpose(w))                       linear(x, w)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, only_user, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops.composite import columns_linear
from autopar.passes.contract import Pass
from autopar.passes.normalise.unflatten import before_flatten

aten = torch.ops.aten

_TRANSPOSES = (aten.transpose.int, aten.t.default, aten.numpy_T.default, aten.mT.default)


@dataclass(frozen=True)
class RecogniseLinear(Pass[CapturedModel]):
    """One rule for linear layers, however they store their matrix; the parameter is their operand."""

    name: ClassVar[str] = "recognise-linear"
    provides: ClassVar[frozenset[str]] = frozenset({"linear layers"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            found = _product(node, captured) or _with_bias(node, captured)
            if found is None:
                continue
            target, x, matrix, bias = found
            product = node.args[0] if node.target is aten.add.Tensor else None
            with graph.inserting_before(node):
                result = add_call(graph, mode, target, (x, matrix, *bias), like=node, value=node.meta["val"])
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            if isinstance(product, fx.Node):
                graph.erase_node(product)
        return captured


def _product(node: fx.Node, captured: CapturedModel) -> tuple[Any, Any, Any, tuple[Any, ...]] | None:
    """(linear or columns_linear, x, matrix, bias if any), if the node is to become that."""
    bias: tuple[Any, ...] = ()
    if node.target is aten.linear.default:
        x, weight, *others = node.args
        matrix = _transposed(weight)
        return None if matrix is None else (columns_linear, x, matrix, tuple(others))
    if node.target is aten.addmm.default and not node.kwargs:
        added, x, weight = node.args
        if not isinstance(added, fx.Node) or shape_of(added) != shape_of(node)[-1:]:
            return None
        bias = (added,)
    elif _is_linear(node, captured):
        x, weight = node.args
    else:
        return None
    matrix = _transposed(weight)
    return (columns_linear, x, weight, bias) if matrix is None else (aten.linear.default, x, matrix, bias)


def _is_linear(node: fx.Node, captured: CapturedModel) -> bool:
    """Whether a product is of rows with a matrix that all of them share."""
    if node.target is aten.mm.default:
        return before_flatten(node.args[0]) is not None
    if node.target is not aten.matmul.default:
        return False
    x, weight = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    parameter = _transposed(weight) or weight
    return len(shape_of(x)) > 1 and len(shape_of(weight)) == 2 and parameter.name in captured.parameters


def _with_bias(node: fx.Node, captured: CapturedModel) -> tuple[Any, Any, Any, tuple[Any, ...]] | None:
    """The layer that a layer without bias becomes with the parameter that is added to it."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    layer: Any
    bias: Any
    layer, bias = node.args if _is_layer(node.args[0]) else reversed(node.args)
    if not _is_layer(layer) or not isinstance(bias, fx.Node) or bias.name not in captured.parameters:
        return None
    if shape_of(bias) != shape_of(layer)[-1:] or dtype_of(bias) != dtype_of(layer):
        return None
    return layer.target, *layer.args, (bias,)


def _is_layer(node: Any) -> bool:
    """Whether a node is a layer without bias that nothing else uses."""
    layer = isinstance(node, fx.Node) and node.target in (aten.linear.default, columns_linear)
    return layer and len(node.args) == 2 and only_user(node) is not None


def _transposed(node: Any) -> fx.Node | None:
    """The matrix of which a node is the transpose."""
    if not isinstance(node, fx.Node) or node.target not in _TRANSPOSES or len(shape_of(node)) != 2:
        return None
    matrix, *dims = node.args
    assert isinstance(matrix, fx.Node)
    return matrix if {d % 2 for d in dims or (0, 1)} == {0, 1} else None  # type: ignore[operator]  # dims are integers
