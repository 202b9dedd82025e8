"""Op clusters: ops whose placement follows from that of one leading op.

A view of a tensor, a pointwise op after one operand, a rotary embedding of a query: wherever their operand
goes they can go too, at no cost, so they need no decision of their own. A cluster is a leader and its
followers; a choice of the leader along one mesh axis decides the choice of every follower.

An op follows only if it has no loops of its own (a matmul has one over its output features) and *every* choice
of the leader leaves it a choice that takes its operands as they come. After a matmul whose result may be a
partial sum, a view follows (it is linear) and a GELU does not.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.analysis.batch_and_sequence import Roles, find_roles
from autopar.ir.analysis.blocks import BlockRepetition
from autopar.ir.graph import CapturedModel, source, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Replicate, Shard
from autopar.ir.rule import Assignment, Choice, FactorRule
from autopar.ir.rules import rule_for

BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCluster:
    """A leader and the ops that follow it.

    leader: None for the cluster of the step inputs and the prelude, whose choices are None and ``"batch"``.
    members: all ops of the cluster in execution order, the leader first.
    follow: leader choice -> choice of each member, along one mesh axis.
    """

    index: int
    leader: fx.Node | None
    members: tuple[fx.Node, ...]
    choices: tuple[Choice, ...]
    follow: Mapping[Choice, Mapping[fx.Node, Choice]]

    def assignment(self, member: fx.Node, leader: Assignment) -> Assignment:
        """The assignment of ``member`` when the leader has assignment ``leader``."""
        return tuple(self.follow[choice][member] for choice in leader)

    def allows(self, leader: Assignment, mesh: Mesh) -> bool:
        """Whether the factors of every member divide by the axes put on them."""
        return all(rule_for(m).allows(self.assignment(m, leader), mesh) for m in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpClusters:
    """Op clusters of the prelude and of the first instance of every distinct block.

    of: the cluster of each of their ops.
    input_dims: step input placeholder -> its batch dimension, None if it has none.
    """

    clusters: tuple[OpCluster, ...]
    of: Mapping[fx.Node, OpCluster]
    input_dims: Mapping[fx.Node, int | None]

    @property
    def inputs(self) -> OpCluster:
        """The cluster of the step inputs and the prelude."""
        return self.clusters[0]

    def input_placement(self, node: fx.Node, choice: Choice) -> Placement:
        """Placement of a step input along one axis when the inputs' choice is ``choice``."""
        dim = self.input_dims[node]
        return Shard(dim) if choice == BATCH and dim is not None else Replicate()


def cluster(captured: CapturedModel, repetition: BlockRepetition, roles: Roles | None = None) -> OpClusters:
    """Group the ops of the prelude and of one instance of every distinct block.

    Linear in the number of ops. Leaders appear in execution order.
    """
    roles = roles or find_roles(captured)
    drafts: list[_Draft] = []
    of: dict[fx.Node, _Draft] = {}
    for index in first_instances(repetition):
        block = repetition.blocks[index]
        inside = set(block.nodes)
        for node in block.nodes:
            if node.target is operator.getitem:
                continue
            rule = rule_for(node)
            draft = _leader_of(node, rule, inside, of, repetition)
            if draft is None:
                choices = _choices_of_leader(node, rule, repetition)
                draft = _Draft(node, [], choices, {choice: {} for choice in choices})
                drafts.append(draft)
                for choice in choices:
                    draft.follow[choice][node] = choice
            draft.members.append(node)
            of[node] = draft
    prelude = _prelude_cluster(repetition, roles)
    clusters = [prelude]
    final: dict[fx.Node, OpCluster] = dict.fromkeys(prelude.members, prelude)
    for number, draft in enumerate(drafts, start=1):
        made = OpCluster(
            index=number,
            leader=draft.leader,
            members=tuple(draft.members),
            choices=draft.choices,
            follow=draft.follow,
        )
        clusters.append(made)
        final.update((node, made) for node in made.members)
    placeholders = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    input_dims = {placeholders[name]: step.batch_dim for name, step in captured.inputs.items()}
    return OpClusters(clusters=tuple(clusters), of=final, input_dims=input_dims)


def first_instances(repetition: BlockRepetition) -> list[int]:
    """Index of the first block of every kind, in order."""
    seen: set[int] = set()
    indices = []
    for block in repetition.blocks:
        if block.kind not in seen:
            seen.add(block.kind)
            indices.append(block.index)
    return indices


@dataclass(slots=True)
class _Draft:
    leader: fx.Node
    members: list[fx.Node]
    choices: tuple[Choice, ...]
    follow: dict[Choice, dict[fx.Node, Choice]]


def _leader_of(
    node: fx.Node, rule: FactorRule, inside: set[fx.Node], of: Mapping[fx.Node, _Draft], repetition: BlockRepetition
) -> _Draft | None:
    """The cluster that ``node`` can follow, with its choices entered there; None if it has to lead."""
    mains: list[tuple[int, fx.Node, int]] = []
    for position, operand in enumerate(tensor_operands(node)):
        producer, result = source(operand)
        if producer.op == "call_function" and producer in repetition.block_of:
            if producer not in inside:
                return None
            mains.append((position, producer, result))
    drafts = {id(of[producer]) for _, producer, _ in mains}
    if len(drafts) != 1 or _has_loops_of_its_own(rule, {position for position, _, _ in mains}):
        return None
    draft = of[mains[0][1]]
    found: dict[Choice, Choice] = {}
    for choice in draft.choices:
        wanted = [
            (position, rule_for(producer).result(result, draft.follow[choice][producer]))
            for position, producer, result in mains
        ]
        for candidate in rule.choices():
            if all(rule.operand(position, candidate)[0] == placement for position, placement in wanted):
                found[choice] = candidate
                break
        else:
            return None
    for choice, own in found.items():
        draft.follow[choice][node] = own
    return draft


def _choices_of_leader(node: fx.Node, rule: FactorRule, repetition: BlockRepetition) -> tuple[Choice, ...]:
    """Choices worth offering: partial sums pass through an op that only moves or adds, not through a matmul."""
    computed = {
        position for position, operand in enumerate(tensor_operands(node)) if source(operand)[0] in repetition.block_of
    }
    passes = not _has_loops_of_its_own(rule, computed)
    return tuple(
        choice
        for choice in rule.choices()
        if choice is None or not choice.startswith("+") or (passes and computed & rule.linear[int(choice[1:])])
    )


def _has_loops_of_its_own(rule: FactorRule, mains: set[int]) -> bool:
    """Whether the op can be sharded in a way that the layout of its operands ``mains`` does not tell."""
    given = {factor for position in mains for dim in rule.operands[position] for factor in dim}
    return (
        rule.leads
        or bool(rule.joint)
        or any(f not in given or f in rule.summed or f in rule.lowered for f in rule.shardable())
    )


def _prelude_cluster(repetition: BlockRepetition, roles: Roles) -> OpCluster:
    nodes = tuple(n for n in repetition.prelude if n.target is not operator.getitem)
    with_batch: dict[fx.Node, Choice] = {}
    for node in nodes:
        factor = roles.batch.get(node)
        with_batch[node] = factor if factor in rule_for(node).shardable() else None
    return OpCluster(
        index=0,
        leader=None,
        members=nodes,
        choices=(None, BATCH),
        follow={None: dict.fromkeys(nodes), BATCH: with_batch},
    )
