"""Products of rows with a matrix become ``aten.linear``.

    addmm(bias, x, w)                                     linear(x, transpose(w), bias)
    mm(reshape(x, [B * S, K]), w)                         linear(reshape(x, [B * S, K]), transpose(w))

All layers that share a matrix share its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.passes.normalise.unflatten import before_flatten
from autopar.passes.pipeline import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class RecogniseLinear(Pass):
    """One op, and so one rule, for linear layers however they store their matrix."""

    name: ClassVar[str] = "recognise-linear"

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        transposes: dict[Any, fx.Node] = {}
        for node in list(call_nodes(graph)):
            found = _product(node)
            if found is None:
                continue
            x, matrix, bias = found
            with graph.inserting_before(node):
                if matrix not in transposes:
                    transposes[matrix] = add_call(graph, mode, aten.transpose.int, (matrix, 0, 1), like=node)
                args = (x, transposes[matrix], *bias)
                result = add_call(graph, mode, aten.linear.default, args, like=node, value=node.meta["val"])
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return captured


def _product(node: fx.Node) -> tuple[Any, Any, tuple[Any, ...]] | None:
    """(x, matrix, bias if any)"""
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, matrix = node.args
        if isinstance(bias, fx.Node) and shape_of(bias) == shape_of(node)[-1:]:
            return x, matrix, (bias,)
    if node.target is aten.mm.default and before_flatten(node.args[0]) is not None:
        return node.args[0], node.args[1], ()
    return None
