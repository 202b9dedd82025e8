"""Loops over the steps of a sequence, which a trace writes out, as one op.

    for t in range(2048):                        s1 = a[:, 0] * s0 + b[:, 0]
        state = a[:, t] * state + b[:, t]        s2 = a[:, 1] * s1 + b[:, 1]      ->  scan(body)(s0, a, b)
        states.append(state)                     ..
    torch.stack(states, 1)                       stack([s1, s2, ..], 1)

A loop is a chain of stretches of a graph that run the same ops. An operand of a stretch may be

    local      computed in the stretch
    carried    computed at the same place of the stretch before: a state
    element    number t of a tensor along one of its dimensions, which counts up or down with the stretches
    shared     the same tensor in all stretches

Loops over slices of parameters are not rolled up: they are layers or experts, whose ops are better divided one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.building import remove_dead
from autopar.ir.capture.module_equality import plain
from autopar.ir.capture.step_writes import stack_writes
from autopar.ir.graph import call_nodes, is_tensor, tensor_results
from autopar.ir.lowered.random import is_random
from autopar.ir.op_graph import dependents, op_graph
from autopar.ir.ops.rolled import Element, Loop, element_of
from autopar.ir.torch_private import FakeTensorMode, pytree

# A shorter loop stays as it is, so that each of its ops may be divided in its own way.
MIN_STEPS = 16


def roll_loops(
    graph: fx.Graph, mode: FakeTensorMode, *, fed: AbstractSet[fx.Node], trained: AbstractSet[fx.Node]
) -> None:
    """Roll up the loops of a functional graph. fed, trained: its step inputs and its parameters."""
    stack_writes(graph, mode, at_least=MIN_STEPS)
    elements = _elements(call_nodes(graph))
    if not elements:
        return
    nodes = [node for node in call_nodes(graph) if node not in elements]
    ops = op_graph(graph.nodes)
    search = _Search(
        nodes=nodes,
        place={node: place for place, node in enumerate(nodes)},
        elements=elements,
        of_inputs=dependents(ops, fed),
        of_parameters=dependents(ops, trained),
    )
    end = 0
    while (found := search.first_loop(end)) is not None:
        end, loop = found
        outs = loop.roll(graph, mode)
        # The steps of one loop may be the elements of the next.
        search.elements.update(_elements(user for out in outs for user in out.users))
        search.of_inputs.update(outs)
    remove_dead(graph)


@dataclass(slots=True, kw_only=True)
class _Search:
    """nodes: the ops of a graph without its elements. of_inputs, of_parameters: what depends on them."""

    nodes: Sequence[fx.Node]
    place: dict[fx.Node, int]
    elements: dict[fx.Node, Element]
    of_inputs: set[fx.Node]
    of_parameters: set[fx.Node]

    def first_loop(self, begin: int) -> tuple[int, Loop] | None:
        """The first loop from place ``begin`` on, and where it ends."""
        for start, period, count, step in sorted(self._runs(begin)):
            chain = _Chain(search=self, start=start, period=period, step=step)
            loop = chain.loop(min(count, (len(self.nodes) - start) // period))
            if loop is not None:
                return self.place[loop.stretches[-1][-1]] + 1, loop
        return None

    def _runs(self, begin: int) -> Iterator[tuple[int, int, int, int]]:
        """(place, period, number of stretches, step of the elements) of what may be loops: uses at equal distances."""
        groups: dict[tuple[fx.Node, int], list[tuple[int, int]]] = {}
        for node, element in self.elements.items():
            uses = [self.place[user] for user in node.users if user in self.place]
            if uses and min(uses) >= begin and self.is_sequence(element.base):
                groups.setdefault((element.base, element.dim), []).append((min(uses), element.index))
        for uses_of in groups.values():
            points = sorted(uses_of)
            first = 0
            while first + 1 < len(points):
                (place, index), (following, other) = points[first : first + 2]
                last = first + 1
                while last + 1 < len(points) and points[last + 1] == (
                    points[last][0] + following - place,
                    points[last][1] + other - index,
                ):
                    last += 1
                if last - first + 1 >= MIN_STEPS and following > place and abs(other - index) == 1:
                    yield place, following - place, last - first + 1, other - index
                first = last

    def is_sequence(self, base: fx.Node) -> bool:
        return base in self.of_inputs or base not in self.of_parameters


@dataclass(slots=True, kw_only=True)
class _Chain:
    """Stretches of ``period`` nodes from place ``start`` on, whose elements count by ``step``."""

    search: _Search
    start: int
    period: int
    step: int

    def loop(self, count: int) -> Loop | None:
        """The loop that the stretches are, if they are alike and enough."""
        if count < MIN_STEPS:
            return None
        described = self._described(1)
        if described is None or any(map(is_random, self._nodes(1))):
            return None
        last = 1
        while last + 1 < count and self._described(last + 1) == described:
            last += 1
        carried = sorted({value for _, _, leaves, _ in described for kind, value in leaves if kind == "carried"})
        states = self._starts(described, carried)
        first = 0
        if states is None:  # the first stretch is no step, but what the others start from
            first, states = 1, [self._nodes(0)[place] for place in carried]
        stretches = [self._nodes(number) for number in range(first, last + 1)]
        if len(stretches) < MIN_STEPS or not carried or not all(map(is_tensor, states)):
            return None
        bases = {value[0] for _, _, leaves, _ in described for kind, value in leaves if kind == "element"}
        if not all(map(self.search.is_sequence, bases)):
            return None
        return Loop(stretches=stretches, elements=self.search.elements, carried=carried, states=states, step=self.step)

    def _nodes(self, number: int) -> Sequence[fx.Node]:
        begin = self.start + number * self.period
        return self.search.nodes[begin : begin + self.period]

    def _described(self, number: int) -> list[tuple[Any, ...]] | None:
        """Every node of a stretch: op, structure and meaning of its arguments, shapes. Equal for steps of one loop."""
        found = []
        for node in self._nodes(number):
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            meant = [self._meaning(leaf, number) for leaf in leaves]
            if any(kind == "far" for kind, _ in meant):
                return None
            shapes = [(tuple(t.shape), t.dtype) for t in tensor_results(node)]
            found.append((node.target, spec, meant, shapes))
        return found

    def _meaning(self, leaf: Any, number: int) -> tuple[str, Hashable]:
        if not isinstance(leaf, fx.Node):
            return "plain", plain(leaf)
        element = self.search.elements.get(leaf)
        if element is not None:
            return "element", (element.base, element.dim, element.kept, element.index - self.step * number)
        before = self.search.place.get(leaf, -1) - self.start
        if before < 0:
            return "shared", leaf
        ago, place = number - before // self.period, before % self.period
        return ("local", "carried", "far")[min(ago, 2)] if ago >= 0 else "far", place

    def _starts(self, described: Sequence[tuple[Any, ...]], carried: Sequence[int]) -> list[fx.Node] | None:
        """What the first stretch has in the place of states; None if it is another program."""
        own = self._described(0)
        found: dict[int, fx.Node] = {}
        if own is None:
            return None
        for node, mine, theirs in zip(self._nodes(0), own, described, strict=True):
            if (*mine[:2], mine[3]) != (*theirs[:2], theirs[3]):
                return None
            for leaf, a, (kind, place) in zip(
                pytree.tree_leaves((node.args, node.kwargs)), mine[2], theirs[2], strict=True
            ):
                if kind == "carried" and isinstance(leaf, fx.Node) and a[0] == "shared" and is_tensor(leaf):
                    if found.setdefault(place, leaf) is not leaf:
                        return None
                elif a != (kind, place):
                    return None
        nodes = self._nodes(0)
        alike = all(_type(found[place]) == _type(nodes[place]) for place in carried)
        return [found[place] for place in carried] if alike else None


def _elements(nodes: Iterable[fx.Node]) -> dict[fx.Node, Element]:
    """Those of ``nodes`` that are an element of a tensor with many."""
    found = {node: element for node in nodes if (element := element_of(node)) is not None}
    count = Counter((element.base, element.dim) for element in found.values())
    return {node: element for node, element in found.items() if count[element.base, element.dim] >= MIN_STEPS}


def _type(node: fx.Node) -> Hashable:
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
