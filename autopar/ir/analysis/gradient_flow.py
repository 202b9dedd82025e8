"""The tensors whose gradients a training step computes.

    x ── linear ── detach ── linear ── loss          of the second linear's weight, and of what it reads: none
         weight             weight

A gradient flows through a tensor of floating point that is made of a parameter that trains and that the loss depends
on, both without a detach between. So frozen weights have none, nor has what is made of frozen weights and step inputs
alone, nor what only other outputs than the loss read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autopar.ir.analysis.gradient_paths import gradient_graph
from autopar.ir.graph import CapturedModel, Parameter, call_nodes
from autopar.ir.op_graph import between, dependencies, op_graph


def gradient_flow(captured: CapturedModel, *, every_output: bool = False) -> frozenset[fx.Node]:
    """The tensors of the captured graph that have a gradient, parameters among them, and the ops that give several.

    Without a loss, or with ``every_output``, as if every output of the model were part of one.
    """
    return flow_to(captured.graph, captured.parameters, _ends(captured, every_output))


def flow_to(graph: fx.Graph, parameters: Mapping[str, Parameter], ends: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """What of a graph has a gradient, if ``ends`` have one. parameters: by placeholder name."""
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    starts = (node for node in graph.nodes if node.op == "placeholder" and node.name in trained)
    return frozenset(between(gradient_graph(graph), starts, ends))


def computed(captured: CapturedModel) -> frozenset[fx.Node]:
    """The ops that a training step computes: those that its loss and its new values of buffers depend on."""
    updates = captured.output_args()[captured.has_loss + captured.num_outputs :]
    ends = (*_ends(captured), *(node for node in updates if isinstance(node, fx.Node)))
    return frozenset(dependencies(op_graph(call_nodes(captured.graph)), ends))


def _ends(captured: CapturedModel, every_output: bool = False) -> Iterable[fx.Node]:
    """The loss, or all outputs of a model without one; with ``every_output`` both."""
    loss = captured.loss_node()
    outputs = captured.output_args()[: captured.has_loss + captured.num_outputs]
    ends = outputs if loss is None or every_output else [loss]
    return [node for node in ends if isinstance(node, fx.Node)]
