"""Recurrences: dimensions that every op of the body keeps apart are factors of the whole.

scan   state d0 d1, sequence d0 _t d1, constant d1 -> d0 d1, d0 _t d1

A dimension of a tensor of the body is *in line* with those that some op divides together with it. A line is a factor if

    every op of the body that touches it can be divided along it, without a lowering and without a sum,
    every state and every result has it, the state before a step where the state after it has it.

A tensor of the body without it is then the same on all ranks, and reaches results only through ops that are divided, so
that its gradients on the ranks are summands: those of operands are as the rule says. Steps are never divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from torch import fx

from autopar.ir.graph import op_nodes, source, tensor_operands
from autopar.ir.ops.scan import AssociativeScan, Body, Dim, Scan, num_combinations
from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule

_STEPS = "_t"

RuleOf = Callable[[fx.Node], FactorRule]


def compose(graph: fx.Graph, rule_of: RuleOf, same: Iterable[tuple[fx.Node, fx.Node]]) -> Body:
    """The body of a graph. same: pairs of tensors that are divided alike, as a state before and after a step."""
    lines = _Lines()
    flops, nonlinear = 0.0, False
    for a, b in same:
        for dim in range(a.meta["val"].ndim):
            lines.join([(*source(a), dim), (*source(b), dim)])
    for node in op_nodes(graph):
        rule = rule_of(node)
        flops, nonlinear = flops + rule.flops, nonlinear or rule.nonlinear
        able = frozenset() if rule.nonlinear or "*" in rule.lowered else set(rule.shardable())
        able -= {*rule.lowered, *rule.summed}
        tensors = [source(operand) for operand in tensor_operands(node)]
        tensors += [(node, number) for number in range(len(rule.results))]
        first: dict[str, list[Dim]] = {}
        for tensor, dims in zip(tensors, (*rule.operands, *rule.results), strict=True):
            for number, factors in enumerate(dims):
                if factors:
                    first.setdefault(factors[0], []).append((*tensor, number))
        for factor, own in first.items():
            lines.join(own)
            if factor in able:
                lines.sizes += [(dim, rule.sizes[factor]) for dim in own]
            else:
                lines.broken.append(own[0])
    return replace(lines.body(graph, flops), nonlinear=nonlinear)


@dataclass(slots=True)
class _Lines:
    """Sets of dimensions that grow together. broken: dimensions that cannot be divided. sizes: of factors that can."""

    parent: dict[Dim, Dim] = field(default_factory=dict)
    broken: list[Dim] = field(default_factory=list)
    sizes: list[tuple[Dim, int]] = field(default_factory=list)

    def find(self, dim: Dim) -> Dim:
        while (above := self.parent.setdefault(dim, dim)) != dim:
            dim = above
        return dim

    def join(self, dims: Sequence[Dim]) -> None:
        first = self.find(dims[0])
        for other in map(self.find, dims[1:]):
            self.parent[other] = first

    def body(self, graph: fx.Graph, flops: float) -> Body:
        broken = set(map(self.find, self.broken))
        sizes: dict[Dim, int] = {}
        for dim, size in self.sizes:
            root = self.find(dim)
            sizes[root] = gcd(sizes.get(root, 0), size)
        numbers = {root: number for number, root in enumerate(root for root in sizes if root not in broken)}
        return Body(
            graph=graph,
            lines={dim: numbers[root] for dim in self.parent if (root := self.find(dim)) in numbers},
            sizes=tuple(sizes[root] for root in numbers),
            flops=flops,
        )


def factors_of(body: Body) -> list[int]:
    """The lines that are factors: once on every result, and on no tensor twice."""
    count: dict[tuple[fx.Node, int, int], int] = {}
    for (node, number, _), line in body.lines.items():
        count[node, number, line] = count.get((node, number, line), 0) + 1
    twice = {line for (_, _, line), times in count.items() if times > 1}
    return [
        line
        for line in range(len(body.sizes))
        if line not in twice and all((*source(node), line) in count for node in body.outputs)
    ]


def length_of(call: Call) -> int:
    """Steps of a scan."""
    op: Scan | AssociativeScan = call.target
    if isinstance(op, Scan):
        first: Operand = op.split(call.operands)[1][0]
        return first.shape[op.sequence_dims[0]]
    return call.operands[0].shape[0]


def num_body_runs(op: Scan | AssociativeScan, length: int) -> int:
    """Times that the body runs over a sequence: once a step, or twice for each level of the tree."""
    return length if isinstance(op, Scan) else 2 * (length.bit_length() - 1)


def work_of_body(op: Scan | AssociativeScan, length: int) -> float:
    """Work over a sequence, in that of the body on the shapes that it was captured with."""
    if isinstance(op, Scan):
        return length
    return num_combinations(length) / int(op.body.placeholders[0].meta["val"].shape[0])


def scan(call: Call) -> FactorRule | None:
    """A scan over a sequence; time is no factor, dimensions that its body keeps apart are."""
    op: Scan = call.target
    states, sequences, constants = op.split(op.body.placeholders)
    writer = _Writer(op.body, factors_of(op.body))
    steps = length_of(call)
    outs = zip(op.body.outputs[op.num_states :], op.out_dims, strict=True)
    rule = writer.factors.rule(
        [
            *map(writer.dims, states),
            *(writer.dims(x, along=dim, steps=steps) for x, dim in zip(sequences, op.sequence_dims, strict=True)),
            *map(writer.dims, constants),
        ],
        [
            *map(writer.dims, op.body.outputs[: op.num_states]),
            *(writer.dims(out, along=dim, steps=steps) for out, dim in outs),
        ],
        flops=work_of_body(op, steps) * op.body.flops,
    )
    return replace(rule, nonlinear=op.body.nonlinear)


def associative_scan(call: Call) -> FactorRule | None:
    """An associative scan; time is no factor, dimensions that its body keeps apart are."""
    op: AssociativeScan = call.target
    places = op.body.placeholders
    steps = length_of(call)
    lines = [line for line in factors_of(op.body) if op.body.lines.get((places[0], 0, 0)) != line]
    writer = _Writer(op.body, lines)
    leaves = [writer.dims(x, steps=steps, along=0, inside=True) for x in places[: op.num_sequences]]
    rule = writer.factors.rule(
        [*leaves, *map(writer.dims, places[2 * op.num_sequences :])],
        leaves,
        flops=work_of_body(op, steps) * op.body.flops,
    )
    return replace(rule, nonlinear=op.body.nonlinear)


@dataclass(slots=True)
class _Writer:
    """Writes the factors of a tensor of the body, and of the sequence that it is a step of."""

    body: Body
    lines: Sequence[int]
    factors: Factors = field(default_factory=Factors)

    def dims(self, node: fx.Node, *, along: int | None = None, steps: int = 1, inside: bool = False) -> TensorFactors:
        """along: the dimension of the steps, which the tensor of the body has itself if it is ``inside``."""
        sizes = enumerate(node.meta["val"].shape)
        found = [self._dim(node, dim, size) for dim, size in sizes if not (inside and dim == along)]
        if along is not None:
            found.insert(along, self.factors.dim(_STEPS, steps, block=True))
        return tuple(found)

    def _dim(self, node: fx.Node, dim: int, size: int) -> DimFactors:
        line = self.body.lines.get((*source(node), dim))
        if line is None or line not in self.lines:
            return self.factors.fresh(size)
        own = self.factors.dim(f"d{line}", self.body.sizes[line])
        return (*own, *self.factors.fresh(size // self.body.sizes[line]))


RULES: dict[str, Rule] = {f"{Scan.__module__}::{rule.__name__}": rule for rule in (scan, associative_scan)}
