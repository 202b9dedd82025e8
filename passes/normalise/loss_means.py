"""The mean of a loss over the tokens that count becomes their sum, divided by how many count.

    cross_entropy(logits, target, reduction='mean')

    loss  = cross_entropy(logits, target, reduction='sum')
    count = sum(ne(target, ignore_index))
    div(loss, count)

A sum may be had in parts, over ranks and over microbatches, whatever part of the targets each has to ignore. The
count depends on the targets alone, so that of the whole batch is known before the first microbatch runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.lowered.shards import arguments
from autopar.ir.ops import composite
from autopar.ir.torch_private import FakeTensorMode, OpOverload
from autopar.passes.contract import Pass

aten = torch.ops.aten

_MEAN, _SUM = 1, 2
_LOSSES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_nd.default,
)


@dataclass(frozen=True)
class SplitLossMeans(Pass[CapturedModel]):
    """Means of losses of class indices, with and without class weights."""

    name: ClassVar[str] = "split-loss-means"
    provides: ClassVar[frozenset[str]] = frozenset({"summed losses"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            if node.target is composite.cross_entropy:
                call = arguments(node)
                if call["reduction"] == "mean":
                    options = {**node.kwargs, "reduction": "sum"}
                    _split(graph, mode, node, node.args, options, call["target"], None, call["ignore_index"])
            elif node.target in _LOSSES:
                call = arguments(node)
                of_indices = not dtype_of(call["target"]).is_floating_point
                if call["reduction"] == _MEAN and of_indices:
                    args = tuple({**call, "reduction": _SUM}.values())
                    _split(graph, mode, node, args, {}, call["target"], call["weight"], call["ignore_index"])
        return captured


def _split(
    graph: fx.Graph,
    mode: FakeTensorMode,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: fx.Node,
    weight: fx.Node | None,
    ignore_index: int,
) -> None:
    """Replace ``node`` by the same op with ``args`` and ``kwargs``, which sums, and a division."""
    assert callable(node.target)
    with graph.inserting_before(node):
        count = _count(graph, mode, node, target, weight, ignore_index)
        total = add_call(graph, mode, node.target, args, kwargs, like=node)
        mean = add_call(graph, mode, aten.div.Tensor, (total, count), like=node)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def _count(
    graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, target: fx.Node, weight: fx.Node | None, ignore_index: int
) -> fx.Node:
    """The number of targets that count, or the sum of the weights of their classes."""

    def add(op: OpOverload, *args: Any) -> fx.Node:
        return add_call(graph, mode, op, args, like=node)

    if weight is None:
        return add(aten.sum.default, add(aten.ne.Scalar, target, ignore_index))
    ignored = add(aten.eq.Scalar, target, ignore_index)
    classes = add(aten.masked_fill.Scalar, target, ignored, 0)
    table = add(aten.reshape.default, weight, [shape_of(weight)[0], 1])
    weights = add(aten.reshape.default, add(aten.embedding.default, table, classes), list(shape_of(target)))
    return add(aten.sum.default, add(aten.masked_fill.Scalar, weights, ignored, 0.0))
