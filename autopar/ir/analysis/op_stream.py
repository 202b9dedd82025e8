"""A captured graph as block repetition is found in it: a sequence of tokens, and which op reads which.

Call nodes fall into three groups:

    prelude   depends on no parameter (positions, rope tables, masks, label shifts)
    source    cheap and made of parameters alone, or of sources and prelude values: a position bias,
              a learned query. It has no place of its own in the sequence; it goes where it is used
    stream    everything else, in execution order

The stream is what repeats are looked for in. Prelude and sources stay out of it, so that a table that
happens to be computed inside the first layer does not make that layer look different from the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from autopar.ir.graph import CapturedModel, call_nodes, is_getitem, tensor_results
from autopar.ir.lowered.random import is_random
from autopar.ir.op_graph import dependents, op_graph
from autopar.ir.rules import rule_for
from autopar.ir.torch_private import OpOverload

# Operations per element of the result from which on an op counts as a contraction: 2 k for a sum over k.
_CONTRACTION_FLOPS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """The non-prelude part of a graph as a sequence.

    nodes: the stream, in execution order; a multi-output op is followed by its ``getitem`` nodes.
    tokens: one per stream node; equal tokens mean equal op, arguments, shapes and kinds of operands.
    reads: per stream node the values that it reads: stream values by position, sources by
        ``len(nodes)`` plus their number.
    position: where a value first exists: the position of a stream node, the first use of a source.
    sources: in execution order, also those that nothing in the stream reads.
    attached: sources that nothing reads (counters of a batch norm), by the stream position they go with.
    heavy: stream nodes that contract with a matrix parameter.
    signature: non-prelude nodes with equal numbers are equal up to the values that they read.
    operands: ``operand_nodes`` of every call node.
    """

    prelude: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    tokens: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]
    attached: dict[int, tuple[fx.Node, ...]]
    heavy: tuple[bool, ...]
    signature: dict[fx.Node, int]
    operands: dict[fx.Node, list[fx.Node]]


def op_name(node: fx.Node) -> str:
    """``linear`` for ``aten.linear.default``, the function's name for a composite op."""
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket.__name__).lstrip("_")
    return str(getattr(node.target, "__name__", node.target)).lstrip("_")


def build_stream(captured: CapturedModel) -> Stream:
    """Sort the call nodes of ``captured`` into prelude, sources and stream. Linear in the graph."""
    calls = _getitems_after_producers(captured.graph)
    operands = {node: operand_nodes(node) for node in calls}
    ops = op_graph(calls)
    trained = outside_prelude(captured, ops)
    fed = dependents(ops, (n for n in captured.graph.nodes if n.op == "placeholder" and n.name in captured.inputs))
    is_source: set[fx.Node] = set()
    prelude: list[fx.Node] = []
    nodes: list[fx.Node] = []
    sources: list[fx.Node] = []
    for node in calls:
        if node not in trained:
            prelude.append(node)
        elif _is_source(node, captured, fed, trained, is_source):
            is_source.add(node)
            sources.append(node)
        else:
            nodes.append(node)
    if not nodes:
        nodes, sources = sources, []
        is_source = set()

    table: dict[object, int] = {}
    signature: dict[fx.Node, int] = {}
    prelude_set = set(prelude)
    shapes = {node: _shape_of(node) for node in captured.graph.nodes if node.op != "output"}
    for node in calls:
        if node not in prelude_set:
            signature[node] = _intern(table, _describe(node, captured, signature, is_source, prelude_set, shapes))

    number = {node: i for i, node in enumerate(nodes)}
    number.update({node: len(nodes) + i for i, node in enumerate(sources)})
    position = list(range(len(nodes))) + [-1] * len(sources)

    def use(node: fx.Node, where: int) -> None:
        if position[number[node]] == -1:
            position[number[node]] = where
            for operand in node.all_input_nodes:
                if operand in is_source:
                    use(operand, where)

    reads: list[tuple[int, ...]] = []
    for where, node in enumerate(nodes):
        values = [operand for operand in operands[node] if operand in number]
        for value in values:
            use(value, where)
        reads.append(tuple(number[value] for value in values))

    attached = _attach_unread(calls, number, position, len(nodes))
    tokens = [signature[node] for node in nodes]
    for where, extra in attached.items():
        tokens[where] = _intern(table, (tokens[where], "with", *(signature[node] for node in extra)))
    return Stream(
        prelude=tuple(prelude),
        nodes=tuple(nodes),
        sources=tuple(sources),
        tokens=tuple(tokens),
        reads=tuple(reads),
        position=tuple(position),
        attached=attached,
        heavy=tuple(is_heavy(node, captured, is_source) for node in nodes),
        signature=signature,
        operands=operands,
    )


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """Every node among the arguments, tensor or not, in argument order; repeats are kept."""
    found: list[fx.Node] = []
    _collect(node.args, found)
    _collect(tuple(node.kwargs.values()), found)
    return found


def is_heavy(node: fx.Node, captured: CapturedModel, sources: set[fx.Node]) -> bool:
    """Whether ``node`` contracts with a parameter of two or more dimensions, given directly or through sources."""
    if is_getitem(node) or not any(_is_matrix(operand, captured, sources) for operand in node.all_input_nodes):
        return False
    if isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
        return False
    return rule_for(node).flops >= _CONTRACTION_FLOPS * sum(result.numel() for result in tensor_results(node))


def _is_matrix(node: fx.Node, captured: CapturedModel, sources: set[fx.Node]) -> bool:
    if node.op == "placeholder":
        parameter = captured.parameters.get(node.name)
        return parameter is not None and sum(size > 1 for size in parameter.shape) >= 2
    return node in sources and any(_is_matrix(operand, captured, sources) for operand in node.all_input_nodes)


def _collect(value: Any, found: list[fx.Node]) -> None:
    if isinstance(value, fx.Node):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(tuple(value.values()), found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)


def _getitems_after_producers(graph: fx.Graph) -> list[fx.Node]:
    """Call nodes in execution order, each ``getitem`` moved to its multi-output op."""
    items = op_graph(node for node in call_nodes(graph) if is_getitem(node))
    ordered: list[fx.Node] = []
    for node in call_nodes(graph):
        if not is_getitem(node):
            ordered.append(node)
            if node in items:
                ordered.extend(item for _, item in nx.bfs_edges(items, node))
    return ordered


def outside_prelude(captured: CapturedModel, ops: nx.DiGraph[fx.Node]) -> set[fx.Node]:
    """Nodes that may not be recomputed at will: they depend on parameters, state that a step updates, or chance.

    ops: the call nodes of ``captured``.
    """
    names = set(captured.parameters) | {n for n, buffer in captured.buffers.items() if buffer.updated_by}
    return dependents(ops, (node for node in ops if node.name in names or is_random(node)))


def _is_source(
    node: fx.Node, captured: CapturedModel, fed: set[fx.Node], trained: set[fx.Node], sources: set[fx.Node]
) -> bool:
    operands = node.all_input_nodes
    if any(o.op == "call_function" and o in trained and o not in sources for o in operands):
        return False
    if node not in fed:
        return not is_heavy(node, captured, sources)
    made_of_sources = any(o in sources for o in operands)
    return made_of_sources and not any(o.name in captured.parameters for o in operands if o.op == "placeholder")


def _intern(table: dict[object, int], key: object) -> int:
    return table.setdefault(key, len(table))


def _describe(
    node: fx.Node,
    captured: CapturedModel,
    signature: dict[fx.Node, int],
    sources: set[fx.Node],
    prelude: set[fx.Node],
    shapes: dict[fx.Node, object],
) -> object:
    """A hashable description of ``node`` that leaves out which values it reads, but not what kind of values."""

    def describe(value: Any) -> object:
        if isinstance(value, fx.Node):
            if value in sources:
                return ("source", signature[value])
            return (_kind(value, captured, prelude), shapes[value])
        if isinstance(value, (tuple, list)):
            return tuple(describe(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, describe(item)) for key, item in value.items())
        if isinstance(value, slice):
            return ("slice", describe(value.start), describe(value.stop), describe(value.step))
        return (type(value).__name__, str(value))

    return (str(node.target), describe(node.args), describe(node.kwargs), shapes[node])


def _kind(node: fx.Node, captured: CapturedModel, prelude: set[fx.Node]) -> str:
    if node.name in captured.parameters:
        return "parameter" if captured.parameters[node.name].requires_grad else "frozen"
    if node.name in captured.buffers:
        return "buffer"
    if node.op != "call_function" or node in prelude:
        return "given"
    return "stream"


def _shape_of(node: fx.Node) -> object:
    results = tensor_results(node)
    return tuple((tuple(t.shape), t.dtype) for t in results) if results else str(node.meta.get("val"))


def _attach_unread(
    calls: list[fx.Node], number: dict[fx.Node, int], position: list[int], length: int
) -> dict[int, tuple[fx.Node, ...]]:
    """Sources that no stream node reads, each with the next stream node in execution order."""
    attached: dict[int, tuple[fx.Node, ...]] = {}
    waiting: list[fx.Node] = []
    for node in calls:
        if node not in number:
            continue
        if number[node] < length:
            if waiting:
                attached[number[node]] = tuple(waiting)
                waiting = []
        elif position[number[node]] == -1:
            waiting.append(node)
    if waiting and length:
        attached[length - 1] = (*attached.get(length - 1, ()), *waiting)
    for where, extra in attached.items():
        for node in extra:
            position[number[node]] = where
    return attached
