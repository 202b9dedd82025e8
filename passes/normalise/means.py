"""A mean becomes a sum and a scale, so that summing a sharded dimension gives partial sums of the mean.

    mean(x, [1])                                          mul(sum(x, [1]), 1 / n)

The count is the global one, whatever part of x a rank has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.sizes import product
from autopar.passes.contract import Pass

aten = torch.ops.aten

_SUMS = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}


@dataclass(frozen=True)
class SplitMeans(Pass[CapturedModel]):
    """Means as scaled sums, with the global count."""

    name: ClassVar[str] = "split-means"
    provides: ClassVar[frozenset[str]] = frozenset({"scaled sums"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            if node.target in _SUMS:
                source: Any = node.args[0]
                assert isinstance(source, fx.Node)
                count = product(shape_of(source)) // max(product(shape_of(node)), 1)
                with graph.inserting_before(node):
                    kwargs = {"dtype": dtype_of(node)} if dtype_of(node) != dtype_of(source) else {}
                    total = add_call(graph, mode, _SUMS[node.target], node.args, kwargs, like=node)
                    mean = add_call(graph, mode, aten.mul.Tensor, (total, 1 / count), like=node)
                node.replace_all_uses_with(mean)
                graph.erase_node(node)
        return captured
