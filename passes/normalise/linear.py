"""Products of rows with a matrix become linear layers.

addmm(bias, x, w)                                     columns_linear(x, w, bias)
mm(reshape(x, [B * S, K]), w)                         columns_linear(reshape(x, [B * S, K]), w)
linear(x, transpose(w), bias)                         columns_linear(x, w, bias)
columns_linear(x, transpose(w))                       linear(x, w)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops import columns_linear
from autopar.passes.normalise.unflatten import before_flatten
from autopar.passes.pipeline import Pass

aten = torch.ops.aten

_TRANSPOSES = (aten.transpose.int, aten.t.default)


@dataclass(frozen=True)
class RecogniseLinear(Pass):
    """One rule for linear layers, however they store their matrix; the parameter is their operand."""

    name: ClassVar[str] = "recognise-linear"

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            found = _product(node)
            if found is None:
                continue
            target, x, matrix, bias = found
            with graph.inserting_before(node):
                result = add_call(graph, mode, target, (x, matrix, *bias), like=node, value=node.meta["val"])
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return captured


def _product(node: fx.Node) -> tuple[Any, Any, Any, tuple[Any, ...]] | None:
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
    elif node.target is aten.mm.default and before_flatten(node.args[0]) is not None:
        x, weight = node.args
    else:
        return None
    matrix = _transposed(weight)
    return (columns_linear, x, weight, bias) if matrix is None else (aten.linear.default, x, matrix, bias)


def _transposed(node: Any) -> fx.Node | None:
    """The matrix of which a node is the transpose."""
    if not isinstance(node, fx.Node) or node.target not in _TRANSPOSES or len(shape_of(node)) != 2:
        return None
    matrix, *dims = node.args
    assert isinstance(matrix, fx.Node)
    return matrix if {d % 2 for d in dims or (0, 1)} == {0, 1} else None  # type: ignore[operator]  # dims are integers
