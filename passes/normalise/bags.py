"""Bags of embeddings as the composite op, whose only result is what a model reads.

    embedding_bag(weight, ids, offsets, mode)[0]

    embedding_bag(weight, ids, None, offsets, mode=mode)      composite
    embedding_bag(weight, ids, mode=mode)                     with ids (B, L), if offsets are arange(0, B * L, L)

Bags that all have equally many rows keep their samples apart; where bags begin is a tensor of its own otherwise, which
could not be divided along with them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.lowered.shards import arguments
from autopar.ir.ops import composite
from autopar.ir.torch_private import FakeTensorMode
from autopar.passes.contract import Pass
from autopar.passes.normalise.constants import ConstantEvaluator

aten = torch.ops.aten

_MODES = ("sum", "mean", "max")


@dataclass(frozen=True)
class RecogniseBags(Pass[CapturedModel]):
    """``aten.embedding_bag`` as ``composite.embedding_bag``, without offsets where they are regular."""

    name: ClassVar[str] = "recognise-bags"
    provides: ClassVar[frozenset[str]] = frozenset({"bags"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        constants = ConstantEvaluator()
        for node in list(call_nodes(graph)):
            if node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
                _rewrite(graph, mode, node, constants)
        return captured


def _rewrite(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, constants: ConstantEvaluator) -> None:
    call = arguments(node)
    used = [user for user in node.users if user.users]
    if call["scale_grad_by_freq"] or call["sparse"]:
        return
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in used):
        return
    options: dict[str, Any] = {"mode": _MODES[call["mode"]]}
    if call.get("padding_idx") is not None:
        options["padding_idx"] = call["padding_idx"] % shape_of(call["weight"])[0]
    if call["include_last_offset"]:
        options["include_last_offset"] = True
    operands = [call["indices"], call["per_sample_weights"]]
    shape = None if call["include_last_offset"] else _regular(call["indices"], call["offsets"], constants)
    with graph.inserting_before(node):
        if shape is not None:
            operands = [o and add_call(graph, mode, aten.reshape.default, (o, shape), like=node) for o in operands]
        else:
            operands.append(call["offsets"])
        while operands[-1] is None:
            operands.pop()
        bag = add_call(graph, mode, composite.embedding_bag, (call["weight"], *operands), options, like=node)
    for user in used:
        user.replace_all_uses_with(bag)


def _regular(indices: fx.Node, offsets: fx.Node, constants: ConstantEvaluator) -> list[int] | None:
    """Number of bags and of the rows of each, if that is one number."""
    (count,), (number,) = shape_of(indices), shape_of(offsets)
    if not number or count % number or not constants.is_constant(offsets):
        return None
    length = count // number
    starts = torch.arange(number) * length
    return [number, length] if torch.equal(constants.evaluate(offsets).to(torch.int64), starts) else None
