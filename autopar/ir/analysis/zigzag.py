"""Folding the sequence of a model: which tensors change order where, so that ranks share causal attention alike.

Most ops do the same at every position and do not mind the order: what runs along the sequence inside the blocks is
kept in folded order (``autopar.ir.sequence``) from end to end, and attention is told. What the blocks read from
outside them (tokens, labels, rotary tables, masks) is made in natural order, and put in folded order where it enters:

    q_1 = mul(q, cos)                 q (b, h, s, d) folded, cos (s, d) natural
    q_1 = mul(q, fold(cos, dim=0))

What minds the order (a slice, a convolution along the sequence) gets its operand back in natural order; no rule
shards such a dimension. A dimension that merges others is folded within: (b s) keeps s apart for each b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopar.ir.analysis.batch_and_sequence import Roles
from autopar.ir.analysis.blocks import Folding
from autopar.ir.graph import CapturedModel, source, tensor_operands
from autopar.ir.lowered.attention import QUERIES, lengths_of, sight_of
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, DimFactors, FactorRule, factors_of_choice

KEYS = "t"

_Value = tuple[fx.Node, int]


class Fold(NamedTuple):
    """A sequence in dimension ``dim`` of a tensor, with ``inner`` elements for each position."""

    dim: int
    inner: int


Use = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSequence:
    """How the sequence of ``length`` runs through the blocks of a model in folded order.

    into: operands, as (op, position), that come in natural order and are folded. back: those that come folded and
    are put back. attentions: causal and sliding ones over the folded sequence. results: what is folded.
    obstacle: why the model cannot be run so; None if it can.
    """

    length: int
    into: Mapping[Use, tuple[Fold, ...]]
    back: Mapping[Use, tuple[Fold, ...]]
    attentions: frozenset[fx.Node]
    results: Mapping[_Value, tuple[Fold, ...]]
    obstacle: str | None = None

    def divides(self, num_folds: int) -> bool:
        """Whether each of as many ranks gets two equal chunks."""
        return self.length % (2 * num_folds) == 0

    def num_folds(self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh) -> int:
        """Number of ranks that share the queries of an attention. Repeats may be left out of ``assignments``."""
        axes = {
            axis
            for node in self.attentions & assignments.keys()
            for axis, choice in enumerate(assignments[node])
            if QUERIES in factors_of_choice(choice)
        }
        return prod(mesh.axes[axis].size for axis in axes)


def fold_sequence(x: Tensor, *, dim: int, length: int, inner: int, folds: int) -> Tensor:
    """``x`` with the sequence in ``dim`` from natural to folded order."""
    parts = x.unflatten(dim, (-1, 2, folds, length // (2 * folds), inner))
    early, late = parts.unbind(dim + 1)
    return torch.stack([early, late.flip(dim + 1)], dim + 2).flatten(dim, dim + 4)


def unfold_sequence(x: Tensor, *, dim: int, length: int, inner: int, folds: int) -> Tensor:
    """``x`` with the sequence in ``dim`` from folded to natural order."""
    parts = x.unflatten(dim, (-1, folds, 2, length // (2 * folds), inner))
    early, late = parts.unbind(dim + 2)
    return torch.stack([early, late.flip(dim + 1)], dim + 1).flatten(dim, dim + 4)


def find_folds(captured: CapturedModel, folding: Folding, roles: Roles) -> FoldedSequence:
    """Follow the sequence of the causal attentions through the blocks. Linear in the graph."""
    lengths = {
        lengths_of(rule)
        for node, rule in roles.rules.items()
        if node in folding.block_of and goes_round(rule) and sight_of(node).kind == "causal"
    }
    if len(lengths) != 1:
        return _impossible(
            "it has causal attentions over sequences of different lengths" if lengths else "it has no causal attention"
        )
    queries, keys = lengths.pop()
    if queries != keys:
        return _impossible(f"a causal attention has {queries} queries and {keys} keys")
    sweep = _Sweep(captured, folding, roles, queries)
    while sweep.run():
        pass
    if sweep.obstacles:
        return _impossible(sweep.obstacles[0])
    return FoldedSequence(
        length=queries,
        into=sweep.into,
        back=sweep.back,
        attentions=frozenset(sweep.attentions),
        results=sweep.results,
    )


def goes_round(rule: FactorRule) -> bool:
    """Whether an op is an attention with a ring."""
    return "ring" in rule.lowered.values()


def _impossible(reason: str) -> FoldedSequence:
    return FoldedSequence(length=0, into={}, back={}, attentions=frozenset(), results={}, obstacle=reason)


@dataclass(slots=True)
class _Sweep:
    captured: CapturedModel
    folding: Folding
    roles: Roles
    length: int
    results: dict[_Value, tuple[Fold, ...]] = field(default_factory=dict)
    into: dict[Use, tuple[Fold, ...]] = field(default_factory=dict)
    back: dict[Use, tuple[Fold, ...]] = field(default_factory=dict)
    attentions: set[fx.Node] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)
    # Factors that a later op needs folded, though nothing that the op reads says so: op -> factor -> inner.
    demanded: dict[fx.Node, dict[str, int]] = field(default_factory=dict)

    def run(self) -> bool:
        """One sweep over the blocks. Returns whether another one is due, because a demand came up."""
        for found in (self.results, self.into, self.back):
            found.clear()
        self.attentions.clear()
        self.obstacles.clear()
        before = sum(map(len, self.demanded.values()))
        for node in self.roles.rules:
            if node in self.folding.block_of:
                self.visit(node)
        return sum(map(len, self.demanded.values())) > before

    def visit(self, node: fx.Node) -> None:
        rule = self.roles.rules[node]
        operands = [source(operand) for operand in tensor_operands(node)]
        folded = self.factors(node, rule, operands)
        positional = goes_round(rule) and sight_of(node).reach != (None, None)
        if positional and (QUERIES in folded) != (KEYS in folded):
            self.obstacles.append(f"{_title(node)} has only its queries or only its keys on the folded sequence")
        elif positional and folded:
            self.attentions.add(node)
        for position, value in enumerate(operands):
            self.operand(node, position, value, rule, folded)
        for number, dims in enumerate(rule.results):
            found = _folds(dims, rule, folded)
            if found:
                self.results[node, number] = found

    def factors(self, node: fx.Node, rule: FactorRule, operands: list[_Value]) -> dict[str, int]:
        """The factors of an op that are folded: factor -> elements for each position."""
        found: dict[str, int] = dict(self.demanded.get(node, {}))
        clashing: set[str] = set()
        for position, value in enumerate(operands):
            for fold in self.results.get(value, ()):
                located = _locate(rule.operands[position][fold.dim], rule, fold.inner, self.length)
                if located is not None and found.setdefault(*located) != located[1]:
                    clashing.add(located[0])
        inside = {
            factor
            for position, (producer, _) in enumerate(operands)
            if producer in self.folding.block_of
            for dim in rule.operands[position]
            for factor in dim
        }
        for factor in self.roles.sequence.get(node, ()):
            if factor not in inside and rule.sizes[factor] == self.length:
                found.setdefault(factor, 1)
        return {f: inner for f, inner in found.items() if f not in clashing and rule.is_positionwise(f)}

    def operand(self, node: fx.Node, position: int, value: _Value, rule: FactorRule, folded: dict[str, int]) -> None:
        """Compare the order that an operand has with the one that its op wants."""
        wanted = _folds(rule.operands[position], rule, folded)
        has = self.results.get(value, ())
        if not wanted and not has:
            return
        producer = value[0]
        missing = tuple(fold for fold in wanted if fold not in has)
        extra = tuple(fold for fold in has if fold not in wanted)
        if extra:
            self.back[node, position] = extra
            self.put_back(node, position, rule, extra)
        if not missing:
            return
        if producer in self.folding.block_of:
            self.demand(node, value, missing)
        elif producer.name in self.captured.parameters:
            name = self.captured.parameters[producer.name].name
            self.obstacles.append(f"parameter {name} runs along the sequence in {_title(node)}")
        else:
            self.into[node, position] = missing

    def put_back(self, node: fx.Node, position: int, rule: FactorRule, folds: tuple[Fold, ...]) -> None:
        """An op that minds the order must have the sequence whole."""
        for fold in folds:
            if not set(rule.shardable()).isdisjoint(rule.operands[position][fold.dim]):
                self.obstacles.append(f"{_title(node)} minds the order of the sequence, which ranks may share there")

    def demand(self, node: fx.Node, value: _Value, missing: tuple[Fold, ...]) -> None:
        """Ask the op that makes ``value`` to make it folded."""
        producer, number = value
        rule = self.roles.rules[producer]
        for fold in missing:
            located = _locate(rule.results[number][fold.dim], rule, fold.inner, self.length)
            if located is None or not rule.is_positionwise(located[0]):
                self.obstacles.append(
                    f"{_title(node)} joins the sequence with {_title(producer)}, which minds the order"
                )
                return
            self.demanded.setdefault(producer, {}).setdefault(*located)


def _locate(dim: DimFactors, rule: FactorRule, inner: int, length: int) -> tuple[str, int] | None:
    """The factor of a dimension that holds the whole sequence, and the elements for each position within it."""
    stride = 1
    for factor in reversed(dim):
        size = rule.sizes[factor]
        if inner % stride == 0 and size % (inner // stride * length) == 0:
            return factor, inner // stride
        stride *= size
    return None


def _folds(dims: tuple[DimFactors, ...], rule: FactorRule, folded: Mapping[str, int]) -> tuple[Fold, ...]:
    """Where the folded factors lie in a tensor."""
    found = []
    for number, dim in enumerate(dims):
        for place, factor in enumerate(dim):
            if factor in folded:
                found.append(Fold(number, folded[factor] * prod(rule.sizes[f] for f in dim[place + 1 :])))
    return tuple(found)


def _title(node: fx.Node) -> str:
    return f"{node.name} ({node.meta.get('source', 'no source')})"
