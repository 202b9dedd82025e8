"""A number that is added to a scalar is a term of its own.

    sub(1.0, x)                                           sub(full([], 1.0), x)

An op on a scalar and a number is not linear, so a sum over the batch could not pass through it in parts; the sum of
two tensors can: each part adds its share of the term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.passes.contract import Pass

aten = torch.ops.aten

# Op of a tensor and a number -> op of two tensors, and whether the number comes first in it.
_TERMS: dict[Any, tuple[Any, bool]] = {
    aten.add.Tensor: (aten.add.Tensor, False),
    aten.add.Scalar: (aten.add.Tensor, False),
    aten.sub.Tensor: (aten.sub.Tensor, False),
    aten.sub.Scalar: (aten.sub.Tensor, False),
    aten.rsub.Scalar: (aten.sub.Tensor, True),
}


@dataclass(frozen=True)
class NumbersToTerms(Pass[CapturedModel]):
    """Numbers added to floating point scalars as tensors."""

    name: ClassVar[str] = "numbers-to-terms"
    provides: ClassVar[frozenset[str]] = frozenset({"terms"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            if node.target not in _TERMS or node.kwargs or len(node.args) != 2:
                continue
            scalar, number = node.args
            if not isinstance(scalar, fx.Node) or isinstance(number, fx.Node) or shape_of(node) != ():
                continue
            if not dtype_of(scalar).is_floating_point:
                continue
            target, number_first = _TERMS[node.target]
            with graph.inserting_before(node):
                options = {"dtype": dtype_of(scalar), "device": scalar.meta["val"].device}
                term = add_call(graph, mode, aten.full.default, ([], number), options, like=node)
                pair = (term, scalar) if number_first else (scalar, term)
                new = add_call(graph, mode, target, pair, {}, like=node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        return captured
