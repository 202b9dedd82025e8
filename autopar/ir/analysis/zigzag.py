"""Zigzag layout of the sequence of a model: which tensors change order where, so that ranks share causal attention.

Most ops do the same at every position and do not depend on the order: tensors along the sequence inside the blocks stay
in zigzag layout (``autopar.ir.sequence``) from end to end, and attention is told. Tensors that the blocks read from
outside them (tokens, labels, rotary tables, masks) are made in natural order, and reordered where they enter:

    q_1 = mul(q, cos)                     q (b, h, s, d) in zigzag layout, cos (s, d) natural
    q_1 = mul(q, to_zigzag(cos, dim=0))

An op that depends on the order (a slice, a convolution along the sequence) gets its operand back in natural order; no
rule shards such a dimension. A dimension that merges others is reordered within: (b s) keeps s apart for each b.

Where all those attentions are within the same packed documents, each row of the batch is in an order of its own, that
of its documents (``autopar.ir.packed_order``), if every tensor along the sequence has the rows too, and no layer scales
tiles of positions together (``autopar.ir.ops.scalings``); otherwise all rows are in zigzag layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopar.ir.analysis.batch_and_sequence import Roles
from autopar.ir.analysis.blocks import BlockRepetition
from autopar.ir.building import shape_of
from autopar.ir.graph import CapturedModel, source, tensor_operands
from autopar.ir.lowered.attention import QUERIES, documents_of, lengths_of, sight_of
from autopar.ir.mesh import Mesh
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.op_recipes import scaling_of
from autopar.ir.rule import Assignment, Choice, DimFactors, FactorRule, factors_of_choice

KEYS = "t"

_Value = tuple[fx.Node, int]


class ZigzagDim(NamedTuple):
    """A sequence in dimension ``dim`` of a tensor, with ``inner`` elements for each position.

    rows: the dimension with the rows of the batch, where each is in an order of its own; ``dim`` if it is merged there.
    """

    dim: int
    inner: int
    rows: int | None = None


Use = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigzagSequence:
    """How the sequence of ``length`` runs through the blocks of a model in zigzag layout.

    into: operands, as (op, position), that come in natural order and are put in zigzag layout. back: operands that come
    in zigzag layout and are put back. attentions: causal and sliding attentions over the sequence. results: tensors in
    zigzag layout. documents: (B, S) or (1, S), if each row is in the order of its packed documents. tile: positions
    that share scales of 8-bit floats, and stay side by side. obstacle: why the model cannot be run so; None if it can.
    """

    length: int
    into: Mapping[Use, tuple[ZigzagDim, ...]]
    back: Mapping[Use, tuple[ZigzagDim, ...]]
    attentions: frozenset[fx.Node]
    results: Mapping[_Value, tuple[ZigzagDim, ...]]
    documents: fx.Node | None = None
    tile: int = 1
    obstacle: str | None = None

    def divisor(self, num_ranks: int) -> int:
        """What the length has to be a multiple of for as many ranks: zigzag layout gives each two equal chunks."""
        return num_ranks if self.documents is not None else 2 * num_ranks * self.tile

    def divides(self, num_ranks: int) -> bool:
        """Whether the length divides for as many ranks."""
        return self.length % self.divisor(num_ranks) == 0

    def num_ranks(self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh) -> int:
        """Number of ranks that share the queries of an attention. Repeats may be left out of ``assignments``."""
        axes = {
            axis
            for node in self.attentions & assignments.keys()
            for axis, choice in enumerate(assignments[node])
            if QUERIES in factors_of_choice(choice)
        }
        return prod(mesh.axes[axis].size for axis in axes)


def to_zigzag(x: Tensor, *, dim: int, length: int, inner: int, zigzag_ranks: int) -> Tensor:
    """``x`` with the sequence in ``dim`` from natural order to zigzag layout."""
    parts = x.unflatten(dim, (-1, 2, zigzag_ranks, length // (2 * zigzag_ranks), inner))
    early, late = parts.unbind(dim + 1)
    return torch.stack([early, late.flip(dim + 1)], dim + 2).flatten(dim, dim + 4)


def from_zigzag(x: Tensor, *, dim: int, length: int, inner: int, zigzag_ranks: int) -> Tensor:
    """``x`` with the sequence in ``dim`` from zigzag layout to natural order."""
    parts = x.unflatten(dim, (-1, zigzag_ranks, 2, length // (2 * zigzag_ranks), inner))
    early, late = parts.unbind(dim + 2)
    return torch.stack([early, late.flip(dim + 1)], dim + 1).flatten(dim, dim + 4)


def find_zigzag(captured: CapturedModel, repetition: BlockRepetition, roles: Roles) -> ZigzagSequence:
    """Follow the sequence of the causal attentions through the blocks. Linear in the graph."""
    attentions = [
        node
        for node, rule in roles.rules.items()
        if node in repetition.block_of and goes_round(rule) and sight_of(node).kind == "causal"
    ]
    lengths = {lengths_of(roles.rules[node]) for node in attentions}
    if len(lengths) != 1:
        return _impossible(
            "it has causal attentions over sequences of different lengths" if lengths else "it has no causal attention"
        )
    queries, keys = lengths.pop()
    if queries != keys:
        return _impossible(f"a causal attention has {queries} queries and {keys} keys")
    tile = _tile_of_rows(captured)
    # The order of documents would tear tiles of rows apart.
    documents = _documents(attentions, repetition) if tile == 1 else None
    sweep = _swept(captured, repetition, roles, queries, documents)
    if sweep.obstacles and sweep.documents is not None:
        sweep = _swept(captured, repetition, roles, queries, None)
    if sweep.obstacles:
        return _impossible(sweep.obstacles[0])
    return ZigzagSequence(
        length=shape_of(tensor_operands(attentions[0])[0])[-2],
        into=sweep.into,
        back=sweep.back,
        attentions=frozenset(sweep.attentions),
        results=sweep.results,
        documents=sweep.documents,
        tile=tile,
    )


def _tile_of_rows(captured: CapturedModel) -> int:
    """Rows next to each other that share a scale in backward, in any linear layer."""
    layers = (scaling_of(node) for node in captured.graph.nodes if node.target is scaled_linear)
    return max((scaling.tile for scaling in layers if scaling is not None), default=1)


def _documents(attentions: Sequence[fx.Node], repetition: BlockRepetition) -> fx.Node | None:
    """The documents that all of some attentions are within, if they are known outside the blocks."""
    found = {documents_of(node) for node in attentions}
    documents = found.pop()
    return documents if documents is not None and not found and documents not in repetition.block_of else None


def _swept(
    captured: CapturedModel, repetition: BlockRepetition, roles: Roles, length: int, documents: fx.Node | None
) -> _Sweep:
    sweep = _Sweep(captured, repetition, roles, length, documents)
    while sweep.run():
        pass
    if documents is not None and any(documents_of(node) is not documents for node in sweep.attentions):
        sweep.obstacles.append("it has attentions within other documents")
    return sweep


def is_positional(node: fx.Node, rule: FactorRule) -> bool:
    """Whether an op is an attention with a ring in which it matters where queries and keys are."""
    return goes_round(rule) and (sight_of(node).reach != (None, None) or documents_of(node) is not None)


def goes_round(rule: FactorRule) -> bool:
    """Whether an op is an attention with a ring."""
    return "ring" in rule.lowered.values()


def _impossible(reason: str) -> ZigzagSequence:
    return ZigzagSequence(length=0, into={}, back={}, attentions=frozenset(), results={}, obstacle=reason)


@dataclass(slots=True)
class _Sweep:
    captured: CapturedModel
    repetition: BlockRepetition
    roles: Roles
    length: int
    documents: fx.Node | None
    results: dict[_Value, tuple[ZigzagDim, ...]] = field(default_factory=dict)
    into: dict[Use, tuple[ZigzagDim, ...]] = field(default_factory=dict)
    back: dict[Use, tuple[ZigzagDim, ...]] = field(default_factory=dict)
    attentions: set[fx.Node] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)
    # Factors that a later op needs in zigzag layout, though no operand of the op shows it: op -> factor -> inner.
    demanded: dict[fx.Node, dict[str, int]] = field(default_factory=dict)

    def run(self) -> bool:
        """One sweep over the blocks. Returns whether another one is due, because a demand came up."""
        for found in (self.results, self.into, self.back):
            found.clear()
        self.attentions.clear()
        self.obstacles.clear()
        before = sum(map(len, self.demanded.values()))
        for node in self.roles.rules:
            if node in self.repetition.block_of:
                self.visit(node)
        return sum(map(len, self.demanded.values())) > before

    def visit(self, node: fx.Node) -> None:
        rule = self.roles.rules[node]
        operands = [source(operand) for operand in tensor_operands(node)]
        inners = self.factors(node, rule, operands)
        positional = is_positional(node, rule)
        if positional and (QUERIES in inners) != (KEYS in inners):
            self.obstacles.append(f"{_title(node)} has only its queries or only its keys on the zigzag sequence")
        elif positional and inners:
            self.attentions.add(node)
        for position, value in enumerate(operands):
            self.operand(node, position, value, rule, inners)
        for number, dims in enumerate(rule.results):
            found = self.zigzag_dims(node, dims, inners)
            if found:
                self.results[node, number] = found

    def zigzag_dims(
        self, node: fx.Node, dims: tuple[DimFactors, ...], inners: Mapping[str, int]
    ) -> tuple[ZigzagDim, ...]:
        """Where the factors in zigzag layout lie in a tensor of an op, and the rows that each is for."""
        rule = self.roles.rules[node]
        found = _zigzag_dims(dims, rule, inners)
        num_rows = 1 if self.documents is None else shape_of(self.documents)[0]
        if num_rows == 1:
            return found
        rows = [rows_dim(dims, own, rule, self.roles.batch.get(node), self.length, num_rows) for own in found]
        if None in rows:
            self.obstacles.append(f"{_title(node)} has a tensor along the sequence that is one for all rows")
        return tuple(ZigzagDim(own.dim, own.inner, at) for own, at in zip(found, rows, strict=True))

    def factors(self, node: fx.Node, rule: FactorRule, operands: list[_Value]) -> dict[str, int]:
        """The factors of an op in zigzag layout: factor -> elements for each position."""
        found: dict[str, int] = dict(self.demanded.get(node, {}))
        clashing: set[str] = set()
        for position, value in enumerate(operands):
            for own in self.results.get(value, ()):
                located = _locate(rule.operands[position][own.dim], rule, own.inner, self.length)
                if located is not None and found.setdefault(*located) != located[1]:
                    clashing.add(located[0])
        inside = {
            factor
            for position, (producer, _) in enumerate(operands)
            if producer in self.repetition.block_of
            for dim in rule.operands[position]
            for factor in dim
        }
        for factor in self.roles.sequence.get(node, ()):
            if factor not in inside and rule.sizes[factor] == self.length:
                found.setdefault(factor, 1)
        return {f: inner for f, inner in found.items() if f not in clashing and rule.is_positionwise(f)}

    def operand(self, node: fx.Node, position: int, value: _Value, rule: FactorRule, inners: dict[str, int]) -> None:
        """Compare the order that an operand has with the one that its op wants."""
        wanted = self.zigzag_dims(node, rule.operands[position], inners)
        has = self.results.get(value, ())
        if not wanted and not has:
            return
        producer = value[0]
        missing = tuple(own for own in wanted if own not in has)
        extra = tuple(own for own in has if own not in wanted)
        if extra:
            self.back[node, position] = extra
            self.put_back(node, position, rule, extra)
        if not missing:
            return
        if producer in self.repetition.block_of:
            self.demand(node, value, missing)
        elif producer.name in self.captured.parameters:
            name = self.captured.parameters[producer.name].name
            self.obstacles.append(f"parameter {name} runs along the sequence in {_title(node)}")
        else:
            self.into[node, position] = missing

    def put_back(self, node: fx.Node, position: int, rule: FactorRule, dims: tuple[ZigzagDim, ...]) -> None:
        """An op that minds the order must have the sequence whole."""
        for own in dims:
            if not set(rule.shardable()).isdisjoint(rule.operands[position][own.dim]):
                self.obstacles.append(f"{_title(node)} minds the order of the sequence, which ranks may share there")

    def demand(self, node: fx.Node, value: _Value, missing: tuple[ZigzagDim, ...]) -> None:
        """Ask the op that makes ``value`` to make it in zigzag layout."""
        producer, number = value
        rule = self.roles.rules[producer]
        for own in missing:
            located = _locate(rule.results[number][own.dim], rule, own.inner, self.length)
            if located is None or not rule.is_positionwise(located[0]):
                self.obstacles.append(
                    f"{_title(node)} joins the sequence with {_title(producer)}, which minds the order"
                )
                return
            self.demanded.setdefault(producer, {}).setdefault(*located)


def rows_dim(
    dims: tuple[DimFactors, ...], own: ZigzagDim, rule: FactorRule, batch: Choice, length: int, num_rows: int
) -> int | None:
    """The dimension of a tensor with the rows that its sequence ``own`` is in as many orders for.

    batch: the factor of rows. Rows and sequence are merged in one dimension, or rows have one to themselves. None if
    the tensor has no rows, or the op is not the same for each of them.
    """
    merged = prod(rule.sizes[factor] for factor in dims[own.dim])
    if merged == num_rows * length * own.inner:
        first = next(factor for factor in dims[own.dim] if rule.sizes[factor] > 1)
        if rule.sizes[first] % num_rows == 0 and (first == batch or rule.sizes[first] % (num_rows * length) == 0):
            return own.dim if rule.is_positionwise(first) else None
    alone = [n for n, dim in enumerate(dims) if [f for f in dim if rule.sizes[f] > 1] == [batch]]
    return alone[0] if batch is not None and alone and rule.is_positionwise(batch) else None


def _locate(dim: DimFactors, rule: FactorRule, inner: int, length: int) -> tuple[str, int] | None:
    """The factor of a dimension that holds the whole sequence, and the elements for each position within it."""
    stride = 1
    for factor in reversed(dim):
        size = rule.sizes[factor]
        if inner % stride == 0 and size % (inner // stride * length) == 0:
            return factor, inner // stride
        stride *= size
    return None


def _zigzag_dims(dims: tuple[DimFactors, ...], rule: FactorRule, inners: Mapping[str, int]) -> tuple[ZigzagDim, ...]:
    """Where the factors in zigzag layout lie in a tensor."""
    found = []
    for number, dim in enumerate(dims):
        for place, factor in enumerate(dim):
            if factor in inners:
                found.append(ZigzagDim(number, inners[factor] * prod(rule.sizes[f] for f in dim[place + 1 :])))
    return tuple(found)


def _title(node: fx.Node) -> str:
    return f"{node.name} ({node.meta.get('source', 'no source')})"
