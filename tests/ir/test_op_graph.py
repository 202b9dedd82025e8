"""What depends on what in a graph of ops, against matrices of paths."""

from __future__ import annotations

import operator

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.ir.analysis.gradient_paths import carries_gradient
from autopar.ir.op_graph import between, dependencies, dependents, op_graph


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    """Graphs of up to ten nodes, each of which reads some of those before it."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for number in range(draw(st.integers(1, 10))):
        operands = draw(st.lists(st.sampled_from(nodes), max_size=3)) if nodes else []
        nodes.append(
            graph.call_function(operator.add, tuple(operands)) if operands else graph.placeholder(f"x{number}")
        )
    return graph


def paths(graph: fx.Graph, through: set[fx.Node]) -> np.ndarray:
    """Entry (i, j): whether a path leads from node i to node j (or they are one) that enters ``through`` alone."""
    nodes = list(graph.nodes)
    found = np.eye(len(nodes), dtype=bool)
    for to, node in enumerate(nodes):
        for operand in node.all_input_nodes if node in through else ():
            found[:, to] |= found[:, nodes.index(operand)]
    return found


@given(graphs(), st.data())
def test_paths(graph: fx.Graph, data: st.DataObject) -> None:
    nodes = list(graph.nodes)
    some = st.sets(st.sampled_from(nodes))
    inside, sources, targets = data.draw(some), data.draw(some), data.draw(some)
    leads = paths(graph, inside)
    ops = op_graph(node for node in nodes if node in inside)
    after = {node for j, node in enumerate(nodes) if any(leads[nodes.index(s), j] for s in sources)}
    before = {node for i, node in enumerate(nodes) if any(leads[i, nodes.index(t)] for t in targets)}
    assert dependents(ops, sources) == after
    assert dependencies(ops, targets) == before
    assert between(ops, sources, targets) == after & before


def test_no_gradient_through_detach_and_integers() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("weight")

    def call(target: object, *args: object, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(2, dtype=dtype, device="meta")
        return node

    aten = torch.ops.aten
    twice = call(aten.mul.Tensor, weight, 2)
    picked = call(aten.argmax.default, twice, dtype=torch.int64)
    for node, expected in (
        (weight, True),
        (twice, True),
        (call(aten.add.Tensor, call(aten.detach.default, twice), 1), False),
        (call(aten.add.Tensor, call(aten.detach.default, twice), twice), True),
        (call(aten.mul.Tensor, picked, 1.0), False),
    ):
        assert carries_gradient(node, {weight}) is expected
