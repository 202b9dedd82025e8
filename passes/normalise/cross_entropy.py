"""Cross entropy over flattened rows becomes ``composite.cross_entropy`` on logits with all their dimensions.

    cross_entropy_loss(reshape(logits, [B * S, C]), reshape(labels, [B * S]))
                                                          cross_entropy(logits, labels)

so that batch and sequence stay separate and a mesh axis can be put on either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops import composite
from autopar.ir.torch_private import TO_COPY, FakeTensorMode
from autopar.passes.contract import Pass

aten = torch.ops.aten

_REDUCTIONS = ("none", "mean", "sum")
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RecogniseCrossEntropy(Pass[CapturedModel]):
    """Losses of class indices without class weights; others stay as they are."""

    name: ClassVar[str] = "recognise-cross-entropy"
    provides: ClassVar[frozenset[str]] = frozenset({"losses over all dimensions"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"summed losses"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            if node.target is aten.cross_entropy_loss.default:
                _rewrite(graph, mode, node)
        return captured


def _rewrite(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node) -> None:
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    logits, target = given["self"], given["target"]
    if given.get("weight") is not None or dtype_of(target).is_floating_point or not shape_of(target):
        return
    options = {
        "ignore_index": given.get("ignore_index", -100),
        "label_smoothing": given.get("label_smoothing", 0.0),
        "reduction": _REDUCTIONS[given.get("reduction", 1)],
    }
    with graph.inserting_before(node):
        if len(shape_of(logits)) > 2:
            order = [0, *range(2, len(shape_of(logits))), 1]
            logits = add_call(graph, mode, aten.permute.default, (logits, order), like=node)
        elif options["reduction"] != "none":
            logits, target = _unflattened(logits, target)
        source = logits.args[0] if logits.target is TO_COPY else None
        if isinstance(source, fx.Node) and dtype_of(source) in _NARROW and dtype_of(logits) == torch.float32:
            # The op widens by itself. Its result is float32 either way.
            logits = source
        loss = add_call(graph, mode, composite.cross_entropy, (logits, target), options, like=node)
    node.replace_all_uses_with(loss)
    graph.erase_node(node)


def _unflattened(logits: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Logits and target before their leading dimensions were merged, if both were in the same way."""
    if logits.target is not aten.reshape.default or target.target is not aten.reshape.default:
        return logits, target
    wide, labels = logits.args[0], target.args[0]
    assert isinstance(wide, fx.Node) and isinstance(labels, fx.Node)
    same = shape_of(wide)[:-1] == shape_of(labels) and shape_of(wide)[-1] == shape_of(logits)[-1]
    return (wide, labels) if same else (logits, target)
