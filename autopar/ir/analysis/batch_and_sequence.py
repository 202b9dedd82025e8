"""Batch and sequence dimensions of all tensors.

The batch enters as a dimension of the step inputs and is carried through the ops by their rules: a factor
that runs over the batch dimension of an operand runs over that of the results.

    ids (b, s)   embedding b s, v h -> b s h   linear b s k, n k -> b s n   mean b s n -> .  (partial over b)

A sum over the batch of step inputs alone (how many tokens count) is known before any part of the batch runs; an op
that needs it whole, as a mean does, is no obstacle (``whole_batch``). What is added to a sum over the batch and reads
no row of it, as a penalty on weights, is counted once: each part of the batch adds its share.

It is carried backwards too: where an op joins a batch with a tensor that was expanded to the size of the
batch, that tensor has a batch dimension as well. This is what cuts a step into microbatches and what
divides the step inputs among data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from autopar.ir.analysis.op_stream import outside_prelude
from autopar.ir.graph import (
    CapturedModel,
    call_nodes,
    has_gradient_dtype,
    is_tensor,
    op_nodes,
    source,
    tensor_operands,
    tensor_results,
)
from autopar.ir.lowered.random import is_random
from autopar.ir.op_graph import dependencies, op_graph
from autopar.ir.rule import Choice, FactorRule, TensorFactors
from autopar.ir.rules import rule_for

# A tensor that is a sum over the batch: a rank or microbatch with some of the rows has a summand of it.
_PARTIAL = -1
_Value = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """Batch and sequence of a captured model.

    rules: every op -> its rule.
    batch: every op -> the choice that follows the batch: its batch factor, ``+k`` where it adds sums over
        the batch, None where it has no batch.
    batch_dim: every tensor node, placeholders too -> its batch dimension, None if it has none.
    sequence, sequence_dim: likewise; an attention has two sequence factors, of queries and of keys.
    obstacles: ops that the batch cannot pass through in parts -> why not.
    """

    rules: Mapping[fx.Node, FactorRule]
    batch: Mapping[fx.Node, Choice]
    sequence: Mapping[fx.Node, frozenset[str]]
    batch_dim: Mapping[fx.Node, int | None]
    sequence_dim: Mapping[fx.Node, int | None]
    obstacles: Mapping[fx.Node, str]


def find_roles(captured: CapturedModel) -> Roles:
    """Follow batch and sequence through all ops. Linear in the graph."""
    sweep = _BatchSweep(captured)
    sweep.run()
    sequence, sequence_tags = _sequence(captured, sweep.rules)
    tensors = [node for node in captured.graph.nodes if node.op != "output" and is_tensor(node)]
    return Roles(
        rules=sweep.rules,
        batch={node: sweep.choice.get(node) for node in sweep.rules},
        sequence=sequence,
        batch_dim={node: _dim(sweep.tags.get(source(node))) for node in tensors},
        sequence_dim={node: sequence_tags.get(source(node)) for node in tensors},
        obstacles=sweep.obstacles,
    )


def microbatch_obstacle(captured: CapturedModel, roles: Roles) -> str | None:
    """Why the batch may not be cut into microbatches, naming the op and its source line; None if it may.

    Only ops that the loss (without one, the outputs) and the updated buffers depend on count.
    """
    flat = captured.output_args()
    wanted = [flat[0]] if captured.has_loss else list(flat)
    updates = {buffer.updated_by for buffer in captured.buffers.values()}
    roots = [n for n in wanted if isinstance(n, fx.Node)] + [n for n in captured.graph.nodes if n.name in updates]
    ops = op_graph(captured.graph.nodes)
    needed = dependencies(ops, roots)
    for node, reason in roles.obstacles.items():
        if node in needed:
            return _at(reason, node)
    return _update_obstacle(captured, roles, ops)


def _update_obstacle(captured: CapturedModel, roles: Roles, ops: nx.DiGraph[fx.Node]) -> str | None:
    """Why the microbatches of a step do not give the new values of the buffers: what is one value of a step has to be
    the same in each of them, or a sum over them."""
    by_name = {node.name: node for node in captured.graph.nodes}
    for buffer in captured.buffers.values():
        new = by_name[buffer.updated_by] if buffer.updated_by is not None else None
        if new is None:
            continue
        if roles.batch_dim.get(new) is not None:
            return _at(f"the buffer {buffer.name} is given something of each row of the batch", new)
        draws = next((node for node in dependencies(ops, [new]) if is_random(node)), None)
        if draws is not None:
            return _at(
                f"the buffer {buffer.name} is given random numbers, which each microbatch would draw anew", draws
            )
    return None


def _at(reason: str, node: fx.Node) -> str:
    where = node.meta.get("source")
    return f"{reason}\n  at {where}" if where else reason


def _dim(tag: int | None) -> int | None:
    return None if tag == _PARTIAL else tag


def major(dims: TensorFactors, number: int, rule: FactorRule) -> str | None:
    """The outermost factor of dimension ``number``."""
    return next((f for f in dims[number] if rule.sizes[f] > 1), None)


def dim_of(dims: TensorFactors, factor: str, rule: FactorRule) -> int | None:
    """The dimension that ``factor`` is the outermost factor of."""
    return next((number for number in range(len(dims)) if major(dims, number, rule) == factor), None)


@dataclass(slots=True)
class _BatchSweep:
    """Tags of values (an op and a result number): a batch dimension, or ``_PARTIAL``."""

    captured: CapturedModel
    rules: dict[fx.Node, FactorRule] = field(init=False)
    operands: dict[fx.Node, list[_Value]] = field(init=False)
    tags: dict[_Value, int] = field(default_factory=dict)
    choice: dict[fx.Node, str] = field(default_factory=dict)
    obstacles: dict[fx.Node, str] = field(default_factory=dict)
    shardable: dict[int, frozenset[str]] = field(default_factory=dict)
    # Ops that depend on parameters or chance; the others are the prelude.
    trained: set[fx.Node] = field(init=False)
    # Values being asked for a batch dimension further up the call stack.
    asking: set[_Value] = field(default_factory=set)
    # Whether one came from behind, so that ops before may have to follow.
    demanded: bool = False

    def __post_init__(self) -> None:
        self.rules = {node: rule_for(node) for node in op_nodes(self.captured.graph)}
        self.operands = {node: [source(o) for o in tensor_operands(node)] for node in self.rules}
        self.trained = outside_prelude(self.captured, op_graph(call_nodes(self.captured.graph)))
        for node in self.captured.graph.nodes:
            step = self.captured.inputs.get(node.name) if node.op == "placeholder" else None
            if step is not None and step.batch_dim is not None and is_tensor(node):
                self.tags[node, 0] = step.batch_dim

    def run(self) -> None:
        """Sweep until no batch comes from behind any more."""
        self.demanded = True
        while self.demanded:
            self.demanded = False
            self.obstacles.clear()
            for node in self.rules:
                self.visit(node)
        for node, rule in self.rules.items():
            if rule.nonlinear and node in self.trained and node not in self.choice:
                self.obstacles.setdefault(node, f"{_title(node)} needs the gradient of the whole batch at once")

    def can_shard(self, rule: FactorRule, factor: str) -> bool:
        if id(rule) not in self.shardable:
            self.shardable[id(rule)] = frozenset(rule.shardable())
        return factor in self.shardable[id(rule)]

    def visit(self, node: fx.Node) -> None:
        rule = self.rules[node]
        tagged = {p: self.tags[v] for p, v in enumerate(self.operands[node]) if v in self.tags}
        if not tagged and node not in self.choice:
            return
        whole: set[int] = set()
        if any(tag == _PARTIAL for tag in tagged.values()):
            if self.add_sums(node, rule, tagged):
                return
            whole = {p for p, tag in tagged.items() if tag == _PARTIAL and self.before_microbatches(node, p)}
            tagged = {p: tag for p, tag in tagged.items() if p not in whole}
            if any(tag == _PARTIAL for tag in tagged.values()):
                if not self.add_sums(node, rule, tagged):
                    self.obstacles[node] = (
                        f"{_title(node)} needs a sum over the whole batch, in other ways than to add to it"
                    )
                return
            if not tagged and node not in self.choice:
                return
        factors = {major(rule.operands[p], tag, rule) for p, tag in tagged.items()}
        if node in self.choice:
            factors.add(self.choice[node])
        if factors == {None}:
            # Of a dimension of size one there is nothing to carry.
            if any(tensor_operands(node)[p].meta["val"].shape[tag] > 1 for p, tag in tagged.items()):
                self.obstacles[node] = f"{_title(node)} needs all rows of the batch at once"
            return
        if len(factors) != 1:
            self.obstacles[node] = f"{_title(node)} combines every row of the batch with every other"
            return
        factor = factors.pop()
        assert factor is not None
        if not self.can_shard(rule, factor):
            self.obstacles[node] = f"{_title(node)} needs all rows of the batch at once"
            return
        self.choice[node] = factor
        if factor in rule.couples:
            self.obstacles[node] = f"{_title(node)} computes statistics over the whole batch"
        for position, value in enumerate(self.operands[node]):
            dim = dim_of(rule.operands[position], factor, rule)
            if dim is None:
                continue
            if position in whole or (value not in self.tags and not self.demand(value, dim)):
                self.obstacles[node] = (
                    f"{_title(node)} reads {value[0].name}, which has a row for each row of the batch but cannot be "
                    "made in parts"
                )
        for number, result in enumerate(rule.results):
            dim = dim_of(result, factor, rule)
            if dim is not None:
                self.tags[node, number] = dim
            elif factor in rule.summed:
                self.tags[node, number] = _PARTIAL

    def before_microbatches(self, node: fx.Node, position: int) -> bool:
        """Whether operand ``position`` is made of step inputs alone: its sum over the batch can be had first."""
        return self.operands[node][position][0] not in self.trained

    def add_sums(self, node: fx.Node, rule: FactorRule, tagged: dict[int, int]) -> bool:
        """Have an op on sums over the batch follow them, if it is linear in them. Returns whether it is.

        It may be so in further operands without a batch: each part of the batch has an equal share of those.
        """
        partial = {p for p, tag in tagged.items() if tag == _PARTIAL}
        operands = tensor_operands(node)
        for number, linear in enumerate(rule.linear):
            shared = all(has_gradient_dtype(operands[p].meta["val"]) for p in linear - partial)
            if linear >= partial and shared and len(partial) == len(tagged):
                self.choice[node] = f"+{number}"
                self.tags.update(((node, result), _PARTIAL) for result in range(len(rule.results)))
                return True
        return False

    def demand(self, value: _Value, dim: int) -> bool:
        """Give ``value`` the batch dimension ``dim`` if the op that makes it can make it in parts."""
        known = self.tags.get(value)
        if known is not None:
            return known == dim
        node, number = value
        if node not in self.rules or value in self.asking:
            return False
        rule = self.rules[node]
        factor = major(rule.results[number], dim, rule)
        if factor is None or not self.can_shard(rule, factor) or self.choice.get(node, factor) != factor:
            return False
        self.asking.add(value)
        for position, operand in enumerate(self.operands[node]):
            wanted = dim_of(rule.operands[position], factor, rule)
            fits = self.tags.get(operand) is None if wanted is None else self.demand(operand, wanted)
            if not fits:
                self.asking.discard(value)
                return False
        self.asking.discard(value)
        self.demanded = True
        self.choice[node] = factor
        for other, result in enumerate(rule.results):
            other_dim = dim_of(result, factor, rule)
            if other_dim is not None:
                self.tags[node, other] = other_dim
        return True


def _sequence(
    captured: CapturedModel, rules: dict[fx.Node, FactorRule]
) -> tuple[dict[fx.Node, frozenset[str]], dict[_Value, int]]:
    """Sequence factors of every op and sequence dimensions of values, from dimension 1 of integer step inputs."""
    tags: dict[_Value, int] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and node.name in captured.inputs and is_tensor(node):
            value = node.meta["val"]
            if value.ndim >= 2 and not value.dtype.is_floating_point and value.dtype != torch.bool:
                tags[node, 0] = 1
    factors: dict[fx.Node, frozenset[str]] = {}
    for node, rule in rules.items():
        found: dict[str, None] = {}
        for position, operand in enumerate(tensor_operands(node)):
            dim = tags.get(source(operand))
            factor = None if dim is None else major(rule.operands[position], dim, rule)
            if factor is not None:
                found[factor] = None
        factors[node] = frozenset(found)
        for number in range(len(tensor_results(node))):
            dims = [dim_of(rule.results[number], factor, rule) for factor in found]
            present = [dim for dim in dims if dim is not None]
            if present:
                tags[node, number] = present[0]
    return factors, tags


def _title(node: fx.Node) -> str:
    """``linear (encoder.layer.0.attention)``."""
    path = node.meta.get("path")
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return f"{name} ({path})" if path else name
