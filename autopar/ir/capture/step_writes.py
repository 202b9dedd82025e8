"""Writes to every place of a dimension, one after another, as one op.

out[:, 0] = a; ..     select_scatter(select_scatter(out, a, 1, 0), b, 1, 1) ..  ->  stack([a, b, ..], 1)
out[:, :1] = a; ..    slice_scatter(..)                                         ->  cat([a, b, ..], 1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, only_user, remove_dead, shape_of
from autopar.ir.graph import call_nodes
from autopar.ir.torch_private import FakeTensorMode

aten = torch.ops.aten

_JOINED = {aten.select_scatter.default: aten.stack.default, aten.slice_scatter.default: aten.cat.default}


def stack_writes(graph: fx.Graph, mode: FakeTensorMode, *, at_least: int) -> None:
    """Rewrite chains that write to all of at least so many places."""
    for node in list(call_nodes(graph)):
        place = _place(node)
        user = only_user(node)
        if place is None or shape_of(node)[place[0]] < at_least or (user is not None and _continues(user, node)):
            continue
        dim, size = place[0], shape_of(node)[place[0]]
        values: dict[int, Any] = {}
        last = node
        while (own := _place(last)) is not None:
            values.setdefault(own[1], last.args[1])
            before = last.args[0]
            if not isinstance(before, fx.Node) or only_user(before) is not last or not _continues(last, before):
                break
            last = before
        if sorted(values) != list(range(size)) or any(dtype_of(v) != dtype_of(node) for v in values.values()):
            continue
        with graph.inserting_before(node):
            parts = [values[index] for index in range(size)]
            made = add_call(graph, mode, _JOINED[node.target], (parts, dim), like=node)  # type: ignore[index]
        node.replace_all_uses_with(made)
    remove_dead(graph)


def _place(node: fx.Node) -> tuple[int, int] | None:
    """(dimension, index) that a write is to."""
    if node.target not in _JOINED:
        return None
    dim: Any = node.args[2] if len(node.args) > 2 else 0
    size = shape_of(node)[dim]
    index: Any = node.args[3] if len(node.args) > 3 and node.args[3] is not None else 0
    if node.target is aten.slice_scatter.default:
        assert isinstance(node.args[1], fx.Node)
        if shape_of(node.args[1])[dim] != 1 or (len(node.args) > 5 and node.args[5] != 1):
            return None
    return dim % len(shape_of(node)), index % size


def _continues(node: fx.Node, before: fx.Node) -> bool:
    """Whether a write is to what another write of its kind and dimension made."""
    a, b = _place(node), _place(before)
    return a is not None and b is not None and a[0] == b[0] and node.target is before.target and node.args[0] is before
