"""Whether a gradient of one tensor of a functional graph reaches another."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autopar.ir.graph import has_gradient_dtype, is_tensor

aten = torch.ops.aten

# Ops through which no gradient flows, whatever they are given.
_CUTS = frozenset({aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default})


def carries_gradient(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Whether ``node`` is one of ``sources`` or computed from them by ops that have a gradient."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current in sources:
            return True
        if current.target in _CUTS:
            continue
        for operand in current.all_input_nodes:
            if operand not in seen and (not is_tensor(operand) or has_gradient_dtype(operand.meta["val"])):
                seen.add(operand)
                stack.append(operand)
    return False
