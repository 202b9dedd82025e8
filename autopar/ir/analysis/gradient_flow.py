"""Which tensors a training step computes a gradient of.

    x ── linear ── detach ── linear ── loss          of the second linear's weight, and of what it reads: none
         weight             weight

A gradient flows through a tensor of floating point that is made of a parameter that trains and that the loss depends
on, both without a detach between. So frozen weights have none, nor has what is made of frozen weights and step inputs
alone, nor what only other outputs than the loss read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from autopar.ir.graph import CapturedModel, has_gradient_dtype, is_tensor

_CUTS = frozenset({torch.ops.aten.detach.default})


def gradient_flow(captured: CapturedModel) -> frozenset[fx.Node]:
    """The tensors of the captured graph that have a gradient, parameters among them, and the ops that give several.

    Without a loss, as if every output of the model were part of one.
    """
    flows: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            parameter = captured.parameters.get(node.name)
            if parameter is not None and parameter.requires_grad:
                flows.add(node)
        elif node.op == "call_function" and _passes(node) and not flows.isdisjoint(node.all_input_nodes):
            flows.add(node)
    return frozenset(flows & _reached(_ends(captured, buffers=False), lambda node: node in flows))


def computed(captured: CapturedModel) -> frozenset[fx.Node]:
    """What a training step computes: all that its loss and its new values of buffers are made of."""
    return frozenset(_reached(_ends(captured, buffers=True), lambda node: True))


def _passes(node: fx.Node) -> bool:
    return node.target not in _CUTS and not (is_tensor(node) and not has_gradient_dtype(node.meta["val"]))


def _ends(captured: CapturedModel, *, buffers: bool) -> Iterable[fx.Node]:
    """The loss, or all outputs of a model without one; new values of buffers."""
    loss = captured.loss_node()
    outputs = captured.output_args()
    first = [loss] if loss is not None else list(outputs[: captured.num_outputs])
    later = outputs[captured.has_loss + captured.num_outputs :] if buffers else ()
    return [node for node in (*first, *later) if isinstance(node, fx.Node)]


def _reached(ends: Iterable[fx.Node], inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """``ends`` and what they are made of, by way of nodes that are ``inside``."""
    found: set[fx.Node] = set()
    waiting = [node for node in ends if inside(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [operand for operand in node.all_input_nodes if inside(operand)]
    return found
