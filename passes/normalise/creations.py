"""Filled tensors of a given size read no other tensor.

    new_zeros(x, [B, S])             zeros([B, S], dtype=x.dtype, device=x.device)
    new_full(x, [B, S], v)           full([B, S], v, dtype=x.dtype, device=x.device)

An operand that gives only dtype and device would have to be whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.passes.contract import Pass

aten = torch.ops.aten

_WITHOUT_OPERAND: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_full.default: aten.full.default,
}


@dataclass(frozen=True)
class DetachCreations(Pass[CapturedModel]):
    """``new_*`` ops without their operand."""

    name: ClassVar[str] = "detach-creations"
    provides: ClassVar[frozenset[str]] = frozenset({"creations without operands"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            target = _WITHOUT_OPERAND.get(node.target)
            if target is None:
                continue
            operand, *args = node.args
            assert isinstance(operand, fx.Node)
            given = {key: value for key, value in node.kwargs.items() if value is not None}
            kwargs = {"dtype": dtype_of(operand), "device": operand.meta["val"].device, **given}
            with graph.inserting_before(node):
                new = add_call(graph, mode, target, tuple(args), kwargs, like=node)
            node.replace_all_uses_with(new)
        return captured
