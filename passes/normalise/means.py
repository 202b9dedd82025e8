"""A mean becomes a sum and a scale, so that summing a sharded dimension gives partial sums of the mean.

    mean(x, [1])                                          mul(sum(x, [1]), 1 / n)
    mse_loss(x, y, reduction='mean')                      mul(mse_loss(x, y, reduction='sum'), 1 / n)

The count is the global one, whatever part of x a rank has, and may have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.lowered.shards import arguments
from autopar.ir.sizes import product
from autopar.passes.contract import Pass

aten = torch.ops.aten

_SUMS = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}

# Losses of every element, whose mean is over all of them, by the name of the reduction.
_MEAN, _SUM = 1, 2
_LOSSES = frozenset(
    {
        aten.mse_loss.default,
        aten.l1_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.kl_div.default,
        aten.soft_margin_loss.default,
    }
)


@dataclass(frozen=True)
class SplitMeans(Pass[CapturedModel]):
    """Means as scaled sums, with the global count; those of losses too."""

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
            elif node.target in _LOSSES and arguments(node)["reduction"] == _MEAN:
                with graph.inserting_before(node):
                    total = add_call(graph, mode, node.target, *_summed(node), like=node)  # type: ignore[arg-type]
                    mean = add_call(graph, mode, aten.mul.Tensor, (total, 1 / _num_elements(node)), like=node)
                node.replace_all_uses_with(mean)
                graph.erase_node(node)
        return captured


def _summed(loss: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a loss that sums."""
    call = {**arguments(loss), "reduction": _SUM}
    named = {name: call.pop(name) for name in loss.kwargs if name != "reduction"}
    return tuple(call.values()), named


def _num_elements(loss: fx.Node) -> int:
    """Of what a loss reduces: its first two operands, broadcast."""
    call = list(arguments(loss).values())
    pairs = zip_longest(*(reversed(shape_of(operand)) for operand in call[:2]), fillvalue=1)
    return product([b if a == 1 else a for a, b in pairs])
