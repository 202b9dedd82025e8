"""The ops of a functional graph that a gradient flows through, and whether it flows from one tensor to another."""

from __future__ import annotations

from collections.abc import Collection

import networkx as nx
import torch
from torch import fx

from autopar.ir.graph import call_nodes, has_gradient_dtype, is_tensor
from autopar.ir.op_graph import dependencies, op_graph

aten = torch.ops.aten

# Ops through which no gradient flows, whatever they are given.
_CUTS = frozenset({aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default})


def gradient_graph(graph: fx.Graph) -> nx.DiGraph[fx.Node]:
    """The op graph in which every path is one of gradients: no edge into a detach or an integer tensor."""
    return op_graph(
        node
        for node in call_nodes(graph)
        if node.target not in _CUTS and (not is_tensor(node) or has_gradient_dtype(node.meta["val"]))
    )


def carries_gradient(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Whether ``node`` is one of ``sources`` or computed from them by ops that have a gradient."""
    return not dependencies(gradient_graph(node.graph), [node]).isdisjoint(sources)
