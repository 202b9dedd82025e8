"""From a plan to the assignment of every op.

A plan names the factors of leading ops of distinct blocks. Followers, repeats of a block, the prelude and the
step inputs are completed from them.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.blocks import BlockKind, BlockRepetition
from autopar.ir.analysis.forward_graph import op_and_operand
from autopar.ir.analysis.op_clusters import BATCH, OpCluster, OpClusters, first_instances
from autopar.ir.errors import InvalidPlan, PlanMismatch
from autopar.ir.graph import CapturedModel, is_getitem, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.plan import BlockPlan, Plan
from autopar.ir.rule import Assignment, factors_of_choice
from autopar.ir.rules import rule_for


def inputs_of(plan: Plan) -> Assignment:
    """Choices of the step inputs: on the axes of ``plan.inputs`` each rank has its own rows of the batch."""
    return tuple(BATCH if name in plan.inputs else None for name in plan.stage_mesh.names)


def assignment_of(analysis: Analysis, plan: Plan) -> tuple[Assignment, ...]:
    """Assignment of every op cluster, by its index, as ``plan`` states it; ops that it leaves out are replicated."""
    names = plan.stage_mesh.names
    stated: dict[fx.Node | None, Assignment] = {None: inputs_of(plan)}
    for kind, index in enumerate(first_instances(analysis.repetition)):
        ops = plan.blocks[kind].ops
        for node in analysis.repetition.blocks[index].nodes:
            factors = ops.get(analysis.repetition.key[node], {})
            stated[node] = tuple(factors.get(name) for name in names)
    return tuple(stated[group.leader] for group in analysis.clusters.clusters)


def spread(analysis: Analysis, assignment: Sequence[Assignment]) -> dict[fx.Node, Assignment]:
    """Assignment of every op of the prelude and of the first block of each kind, from that of every op cluster."""
    return {
        member: group.assignment(member, leader)
        for group, leader in zip(analysis.clusters.clusters, assignment, strict=True)
        for member in group.members
    }


def complete(analysis: Analysis, assignments: Mapping[fx.Node, Assignment]) -> dict[fx.Node, Assignment]:
    """Assignment of every op of the model: repeats of a block are placed as the first."""
    every = dict(assignments)
    for node, first in analysis.repetition.representative.items():
        if node.op == "call_function" and node.target is not operator.getitem:
            every[node] = assignments[first]
    return every


def check_plan_fits(analysis: Analysis, plan: Plan) -> None:
    """Raise PlanMismatch if ``plan`` was made for another model or batch.

    Raises InvalidPlan if it names an op that does not exist or follows another, a factor that the op cannot be sharded
    on, or one that its axes do not divide.
    """
    check_model(analysis.captured, analysis.repetition, plan)
    check_choices(analysis, plan)


def check_choices(analysis: Analysis, plan: Plan) -> None:
    """Raise PlanMismatch or InvalidPlan if ``plan`` states other blocks than the model's, or what ops cannot have."""
    if not _same_blocks(analysis.repetition, plan):
        raise _mismatch(analysis.captured, analysis.repetition, plan)
    repetition, clusters, mesh = analysis.repetition, analysis.clusters, plan.stage_mesh
    assignment = assignment_of(analysis, plan)
    _check_sizes(clusters.inputs, assignment[clusters.inputs.index], mesh, "the step inputs")
    for kind, index in enumerate(first_instances(repetition)):
        nodes, stated = repetition.blocks[index].nodes, plan.blocks[kind]
        own = {
            repetition.key[node]: clusters.of[node]
            for node in nodes
            if node in clusters.of and clusters.of[node].leader is node
        }
        _check_keys(stated, own, repetition, nodes, clusters)
        _check_kept(stated, {repetition.key[node]: node for node in nodes if not is_getitem(node)})
        for key, group in own.items():
            possible = ", ".join(c for c in group.choices if c) or "none; leave the op out"
            for name, value in zip(mesh.names, assignment[group.index], strict=True):
                if value not in group.choices:
                    raise InvalidPlan(
                        f"plan: op {key!r} of block {stated.name!r} cannot be sharded on factor {value!r} (mesh axis "
                        f"{name!r}).\n  expected one of: {possible}"
                    )
            _check_sizes(group, assignment[group.index], mesh, f"op {key!r} of block {stated.name!r}")


def check_model(captured: CapturedModel, repetition: BlockRepetition, plan: Plan) -> None:
    """Raise PlanMismatch unless ``plan`` was made for this model."""
    if not _same_blocks(repetition, plan) or plan.model.fingerprint != captured.fingerprint:
        raise _mismatch(captured, repetition, plan)


def _same_blocks(repetition: BlockRepetition, plan: Plan) -> bool:
    return [(kind.name, kind.repeats) for kind in repetition.kinds] == [(own.name, own.repeats) for own in plan.blocks]


def _mismatch(captured: CapturedModel, repetition: BlockRepetition, plan: Plan) -> PlanMismatch:
    return PlanMismatch(
        f"the plan was made for another model: {plan.model.name!r} with blocks {_listing(plan.blocks)}; this is "
        f"{captured.name!r} with blocks {_listing(repetition.kinds)}.\n"
        f"  fingerprint: the plan has {plan.model.fingerprint}, this model and its example inputs have "
        f"{captured.fingerprint}\n"
        "  try: search a new plan, or pass the model and the example input shapes that the plan was made for"
    )


def _listing(blocks: Sequence[BlockPlan | BlockKind]) -> str:
    return ", ".join(f"{own.name} x {own.repeats}" if own.repeats > 1 else own.name for own in blocks)


def _check_sizes(group: OpCluster, leader: Assignment, mesh: Mesh, what: str) -> None:
    """Check that the sizes of every member divide."""
    for member in group.members:
        own = group.assignment(member, leader)
        rule = rule_for(member)
        if not rule.allows(own, mesh):
            sizes = {f: rule.sizes[f] for choice in own for f in factors_of_choice(choice)}
            shown = ", ".join(f"{factor}={size}" for factor, size in sizes.items())
            line = member.meta.get("source")
            raise InvalidPlan(
                f"plan: {what} does not divide on mesh {mesh}: {member.name} has factors {shown}, "
                f"sharded as {dict(zip(mesh.names, own, strict=True))}.\n"
                + (f"  at {line}\n" if line else "")
                + "  expected sizes that are multiples of the product of the axes put on them\n"
                "  try: a smaller axis, or leave the op replicated on it"
            )


def _check_kept(stated: BlockPlan, every: Mapping[str, fx.Node]) -> None:
    """Check that ops exist whose results, or operands, the plan lists."""
    for listed in stated.kept.values():
        for name in listed:
            key, position = op_and_operand(name)
            if key not in every:
                close = difflib.get_close_matches(key, every, n=3)
                raise InvalidPlan(
                    f"plan: block {stated.name!r} has no op {key!r} whose result could be kept.\n"
                    f"  did you mean: {', '.join(close) or ', '.join(every)}"
                )
            count = len(tensor_operands(every[key]))
            if position is not None and position >= count:
                raise InvalidPlan(
                    f"plan: {name!r} of block {stated.name!r} is to be kept; op {key!r} has {count} operands, counted "
                    "from 0"
                )


def _check_keys(
    stated: BlockPlan,
    deciding: dict[str, OpCluster],
    repetition: BlockRepetition,
    nodes: tuple[fx.Node, ...],
    clusters: OpClusters,
) -> None:
    every = {repetition.key[node]: node for node in nodes}
    for key in stated.ops:
        if key in deciding:
            continue
        node = every.get(key)
        if node is not None and node in clusters.of:
            leader = clusters.of[node].leader
            assert leader is not None
            raise InvalidPlan(
                f"plan: op {key!r} of block {stated.name!r} follows {repetition.key[leader]!r} and has no factors of "
                f"its own.\n  try: shard {repetition.key[leader]!r} instead"
            )
        close = difflib.get_close_matches(key, deciding, n=3)
        raise InvalidPlan(
            f"plan: block {stated.name!r} has no op {key!r}.\n  did you mean: {', '.join(close) or ', '.join(deciding)}"
        )
