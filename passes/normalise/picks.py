"""One entry picked from each row is a gather.

    index(x (B, S, H), [arange(B), last (B)])         reshape(gather(x, 1, expand(last)), [B, H])

Models read the state of each text's last token so. An ``index`` cannot know that the rows stay apart: it would need
the whole batch on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.passes.contract import Pass
from autopar.passes.normalise.identity_index import counts

aten = torch.ops.aten


@dataclass(frozen=True)
class PicksToGather(Pass[CapturedModel]):
    """``index`` by ``arange`` over the rows and one entry for each as ``gather``."""

    name: ClassVar[str] = "picks-to-gather"
    provides: ClassVar[frozenset[str]] = frozenset({"picks as gathers"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            entry = _entry(node)
            if entry is None:
                continue
            x = node.args[0]
            assert isinstance(x, fx.Node)
            rows, size, *rest = shape_of(x)
            with graph.inserting_before(node):
                # Negative entries count from the end, which gather does not know.
                entry = add_call(graph, mode, aten.remainder.Scalar, (entry, size), like=node)
                entry = add_call(graph, mode, aten.reshape.default, (entry, [rows, 1, *[1] * len(rest)]), like=node)
                entry = add_call(graph, mode, aten.expand.default, (entry, [rows, 1, *rest]), like=node)
                picked = add_call(graph, mode, aten.gather.default, (x, 1, entry), like=node)
                picked = add_call(graph, mode, aten.reshape.default, (picked, [rows, *rest]), like=node)
            node.replace_all_uses_with(picked)
        return captured


def _entry(node: fx.Node) -> fx.Node | None:
    """The entry that is picked from each row."""
    if node.target is not aten.index.Tensor:
        return None
    x, indices = node.args
    assert isinstance(x, fx.Node) and isinstance(indices, (list, tuple))
    if len(indices) != 2 or not all(isinstance(index, fx.Node) for index in indices):
        return None
    row, entry = indices
    assert isinstance(row, fx.Node) and isinstance(entry, fx.Node)
    rows = shape_of(x)[0]
    integers = entry.meta["val"].dtype in (torch.int64, torch.int32)
    return entry if integers and shape_of(row) == shape_of(entry) == (rows,) and counts(row) else None
