"""Layers that widen each row and narrow it again: what lies between can be computed for some rows at a time.

    x (t, h) ─┬─ linear ─ silu ─┐
              └─ linear ────── mul ─ linear ── y (t, h)         a row of y needs one row of x, and all weights

A region ends in a linear layer. Before it are ops each of whose rows needs one row of the operands alone, up to
linear layers and with them, and nothing outside the region reads what they make. Factor rules say what acts on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.graph import is_getitem, tensor_operands, tensor_results
from autopar.ir.ops.composite import columns_linear
from autopar.ir.rule import FactorRule


@dataclass(frozen=True, slots=True)
class RowRegion:
    """nodes: in order; the last is the linear layer that ends it. rows: what it reads row by row. others: what it reads
    whole, as weights."""

    nodes: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        """The linear layer that ends the region."""
        return self.nodes[-1]

    @property
    def made(self) -> tuple[fx.Node, ...]:
        """The ops before that, which make what is wide."""
        return tuple(node for node in self.nodes[:-1] if not is_getitem(node))

    @property
    def width(self) -> int:
        """Numbers that these ops make of a row."""
        return sum(map(_width, self.made))


def row_regions(nodes: Sequence[fx.Node], rules: Callable[[fx.Node], FactorRule | None]) -> list[RowRegion]:
    """The regions among ``nodes``, a block's ops in order, that are wider inside than what they read and make.

    rules: of an op, None of one that stays outside."""
    place = {node: number for number, node in enumerate(nodes)}
    found: list[RowRegion] = []
    taken: set[fx.Node] = set()
    for node in reversed(nodes):
        if node not in taken and _is_linear(node):
            region = _region(node, nodes[: place[node]], place, rules)
            if region is not None and taken.isdisjoint(region.nodes):
                found.append(region)
                taken.update(region.nodes)
    return found[::-1]


def _is_linear(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.linear.default, columns_linear) and not node.kwargs


def _region(
    last: fx.Node, before: Sequence[fx.Node], place: dict[fx.Node, int], rules: Callable[[fx.Node], FactorRule | None]
) -> RowRegion | None:
    """The region that ``last`` ends, if there is one."""
    ends = _read(last, rules)
    if ends is None:
        return None
    inside = {last}
    given: dict[fx.Node, None] = {}  # what linear layers inside read: not grown beyond
    rows, others = (dict.fromkeys(operands) for operands in ends)
    for node in reversed(before):
        if node not in rows or node in given or not inside.issuperset(node.users):
            continue
        read = _read(node, rules)
        if read is None:
            continue
        inside.add(node)
        del rows[node]
        rows.update(dict.fromkeys(read[0]))
        others.update(dict.fromkeys(read[1]))
        if _is_linear(node):
            given.update(dict.fromkeys(read[0]))
    region = RowRegion(tuple(sorted(inside, key=place.__getitem__)), tuple(rows), tuple(others))
    narrow = sum(map(_width, region.rows)) + _width(last)
    return region if rows.keys().isdisjoint(others) and region.width > narrow else None


def _width(node: fx.Node) -> int:
    """Elements of a row."""
    return sum(int(value.shape[-1]) for value in tensor_results(node))


def _read(
    node: fx.Node, rules: Callable[[fx.Node], FactorRule | None]
) -> tuple[Sequence[fx.Node], Sequence[fx.Node]] | None:
    """What an op reads row by row, and what whole, if each row of its results needs one row of the former alone."""
    if is_getitem(node):
        return [node.all_input_nodes[0]], []
    rule = rules(node)
    if rule is None or not rule.results or not rule.results[0]:
        return None
    lead = rule.results[0][:-1]
    factors = {factor for dim in lead for factor in dim}
    if not factors or not factors.isdisjoint((*rule.lowered, *rule.couples, *rule.blocked)) or "*" in rule.lowered:
        return None
    if any(result[:-1] != lead for result in rule.results):
        return None
    rows, others = [], []
    for operand, dims in zip(tensor_operands(node), rule.operands, strict=True):
        inner = dims[-1] if dims else ()
        if dims[:-1] == lead and len(dims) == len(lead) + 1 and factors.isdisjoint(inner):
            rows.append(operand)
        elif factors.isdisjoint(factor for dim in dims for factor in dim):
            others.append(operand)
        else:
            return None
    return (rows, others) if rows and factors.isdisjoint(rule.results[0][-1]) else None
