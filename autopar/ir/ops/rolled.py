"""A loop that a graph writes out step by step, and the op in its place: see ``rolling``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.building import add_call, remove_dead, shape_of
from autopar.ir.ops.scan import Scan, body_of, one_of_its_kind
from autopar.ir.rules import rule_for
from autopar.ir.rules.scan import compose
from autopar.ir.torch_private import FakeTensorMode

aten = torch.ops.aten

_JOINS = (aten.stack.default, aten.cat.default)


@dataclass(frozen=True, slots=True)
class Element:
    """Number ``index`` of ``base`` along ``dim``, which is gone, or left as a dimension of one if it is ``kept``."""

    base: fx.Node
    dim: int
    index: int
    kept: bool


def element_of(node: fx.Node) -> Element | None:
    """select(x, 1, t), slice(x, 1, t, t + 1), and what unbind and split make of x."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        if source.target not in (aten.unbind.int, aten.split.Tensor):
            return None
        kept = source.target is aten.split.Tensor
        dim = source.args[1 + kept] if len(source.args) > 1 + kept else source.kwargs.get("dim", 0)
        if kept and source.args[1] != 1:
            return None
    elif node.target is aten.select.int:
        source, dim, index = node.args
        kept = False
    elif node.target is aten.slice.Tensor and len(node.args) == 4 and not node.kwargs:
        source, dim, index, stop = node.args
        kept = True
        if not isinstance(stop, int) or not isinstance(dim, int) or shape_of(node)[dim] != 1:
            return None
    else:
        return None
    assert isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, int)
    base = source.args[0] if node.target is operator.getitem else source
    assert isinstance(base, fx.Node)
    return Element(base, dim % len(shape_of(base)), index % shape_of(base)[dim], kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop of a graph.

    stretches: the nodes of each step. elements: of the whole graph. carried: places in a stretch of what the next step
    reads. states: what the first step reads instead. step: by which the elements count, 1 or -1.
    """

    stretches: Sequence[Sequence[fx.Node]]
    elements: Mapping[fx.Node, Element]
    carried: Sequence[int]
    states: Sequence[fx.Node]
    step: int
    _inside: set[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_inside", {node for stretch in self.stretches for node in stretch})

    def roll(self, graph: fx.Graph, mode: FakeTensorMode) -> list[fx.Node]:
        """Put a scan in the place of the loop; the sequences that it returns."""
        first, template = self.stretches[:2]
        kept = self._read_outside()
        with graph.inserting_before(first[0]):
            taken = dict.fromkeys(n for node in template for n in node.all_input_nodes if n in self.elements)
            sequences = [self._sequence(graph, mode, first[0], self.elements[node]) for node in taken]
            entries, nodes = [first[place] for place in self.carried], list(template)
            for node in taken:
                entry, unfolded = self._entry(graph, mode, node)
                entries.append(entry)
                nodes[:0] = unfolded
                for own in template:
                    own.replace_input_with(node, unfolded[0] if unfolded else node)
            outputs = [template[place] for place in (*self.carried, *kept)]
            body, constants = body_of(nodes, entries, outputs)
            remove_dead(body)
            out_dims = [self._stacked_along(place) for place in kept]
            places = [n for n in body.nodes if n.op == "placeholder"][: len(self.carried)]
            made: Any = body.output_node().args[0]
            op = Scan(
                body=compose(body, rule_for, list(zip(places, made))),
                num_states=len(self.carried),
                sequence_dims=tuple(self.elements[node].dim for node in taken),
                out_dims=tuple(out_dims),
            )
            operands = (*self.states, *sequences, *constants)
            scan = add_call(graph, mode, one_of_its_kind(op), operands, like=first[0])
            results = [
                add_call(graph, mode, operator.getitem, (scan, number), like=first[0]) for number in range(len(made))
            ]
        states, outs = results[: len(self.carried)], results[len(self.carried) :]
        for place, out, dim in zip(kept, outs, out_dims, strict=True):
            self._replace(graph, mode, place, out, dim)
        for place, state in zip(self.carried, states, strict=True):
            self._replace_outside(self.stretches[-1][place], state)
        for stretch in reversed(self.stretches):
            for node in reversed(stretch):
                graph.erase_node(node)
        return outs

    def _sequence(self, graph: fx.Graph, mode: FakeTensorMode, like: fx.Node, element: Element) -> fx.Node:
        """The elements of all steps, in their order. element: that of the second one."""
        count, found = len(self.stretches), element.base
        first = element.index - self.step
        low = min(first, first + self.step * (count - 1))
        if count < shape_of(found)[element.dim]:
            found = add_call(graph, mode, aten.slice.Tensor, (found, element.dim, low, low + count), like=like)
        if self.step < 0:
            found = add_call(graph, mode, aten.flip.default, (found, [element.dim]), like=like)
        return found

    def _entry(self, graph: fx.Graph, mode: FakeTensorMode, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """What the body is given for an element, and the op that gives it its dimension of one back."""
        element = self.elements[node]
        if not element.kept:
            return node, []
        entry = add_call(graph, mode, aten.select.int, (element.base, element.dim, element.index), like=node)
        return entry, [add_call(graph, mode, aten.unsqueeze.default, (entry, element.dim), like=node)]

    def _outside(self, node: fx.Node) -> list[fx.Node]:
        """Users that are no step of the loop."""
        return [user for user in node.users if user not in self._inside]

    def _read_outside(self) -> list[int]:
        """Places of what is read after the loop, but for the last states."""
        last = self.stretches[-1]
        return [
            place
            for place in range(len(last))
            if any(self._outside(stretch[place]) for stretch in self.stretches[:-1])
            or (place not in self.carried and self._outside(last[place]))
        ]

    def _stacked_along(self, place: int) -> int:
        """The dimension along which the steps are put together afterwards, the first one if they are not."""
        node = self.stretches[1][place]
        return next((_axis(user) for user in self._outside(node) if user.target in _JOINS), 0)

    def _replace(self, graph: fx.Graph, mode: FakeTensorMode, place: int, out: fx.Node, dim: int) -> None:
        """Have what read the nodes at a place of the steps read ``out``, which has them all along ``dim``."""
        column = [stretch[place] for stretch in self.stretches]
        for user in self._outside(column[1]):
            if user.target in _JOINS and _axis(user) == dim:
                _join(graph, mode, user, column, out)
        for number, node in enumerate(column):
            if self._outside(node):
                with graph.inserting_after(out):
                    own = add_call(graph, mode, aten.select.int, (out, dim, number), like=node)
                self._replace_outside(node, own)

    def _replace_outside(self, node: fx.Node, new: fx.Node) -> None:
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self._inside)


def _axis(join: fx.Node) -> int:
    dim = join.args[1] if len(join.args) > 1 else join.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(shape_of(join))


def _join(graph: fx.Graph, mode: FakeTensorMode, user: fx.Node, column: Sequence[fx.Node], out: fx.Node) -> None:
    """Put ``out`` in the place of ``column``, also backwards, among what ``user`` stacks or concatenates."""
    parts: list[Any] = list(user.args[0])  # type: ignore[arg-type]  # nodes
    count, dim = len(column), _axis(user)
    backwards = column[-1] in parts and parts.index(column[-1]) < parts.index(column[0])
    order = list(reversed(column)) if backwards else list(column)
    start = parts.index(order[0]) if order[0] in parts else 0
    if parts[start : start + count] != order:
        return
    with graph.inserting_before(user):
        if backwards:
            out = add_call(graph, mode, aten.flip.default, (out, [dim]), like=user)
        if user.target is aten.cat.default:
            shape = list(shape_of(out))
            shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
            out = add_call(graph, mode, aten.reshape.default, (out, shape), like=user)
        others = [parts[:start], parts[start + count :]]
        around = [add_call(graph, mode, user.target, (p, dim), like=user) if p else None for p in others]  # type: ignore[arg-type]
        whole = [part for part in (around[0], out, around[1]) if part is not None]
        made = whole[0] if len(whole) == 1 else add_call(graph, mode, aten.cat.default, (whole, dim), like=user)
    user.replace_all_uses_with(made)
    graph.erase_node(user)
