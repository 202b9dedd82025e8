"""Partitioning: from a captured model and a plan to one program per pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.ir.analysis.batch_and_sequence import Roles, find_roles, microbatch_obstacle
from autopar.ir.analysis.blocks import Folding, fold
from autopar.ir.analysis.derived_parameters import find_derived, passing_axes
from autopar.ir.analysis.limit_experts import limit_experts
from autopar.ir.analysis.op_clusters import Clusters, cluster
from autopar.ir.analysis.zigzag import FoldedSequence, find_folds
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.precision import narrow_dtype
from autopar.ir.program import StageProgram
from autopar.ir.rule import Assignment
from autopar.passes.assign import assign
from autopar.passes.carry import carry
from autopar.passes.parameters import Storage, find_uses, store
from autopar.passes.settle import settle
from autopar.passes.shard import shard
from autopar.passes.split import split_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A captured model under a plan: its blocks, the assignment of every op, and how parameters are stored."""

    captured: CapturedModel
    roles: Roles
    folding: Folding
    clusters: Clusters
    assignments: Mapping[fx.Node, Assignment]
    storage: Mapping[str, Storage]
    shard_axes: tuple[int, ...]


def partition(
    captured: CapturedModel,
    plan: Plan,
    *,
    outputs: Literal["loss", "model"] = "loss",
    like: CapturedModel | None = None,
) -> tuple[StageProgram, ...]:
    """The local program of every stage of ``plan``.

    outputs: "loss" for a training step (the captured loss alone), "model" for a plain forward. like: the capture that
    the plan was made for, if ``captured`` is one of the same model in another mode: parameters stay where that one has
    them, and its ops are placed as there (``autopar.passes.carry``).
    Raises PlanMismatch or InvalidPlan, saying why the plan does not fit the model.
    """
    if outputs == "loss" and not captured.has_loss:
        raise PlanMismatch(
            f"{captured.name} has no loss: its output is not a scalar and has no .loss.\n"
            "  try: pass loss_fn=..., or labels among the example inputs"
        )
    placed = place(captured, plan) if like is None else _place_like(captured, plan, place(like, plan))
    captured, folding, roles = placed.captured, placed.folding, placed.roles
    passing = passing_axes(find_derived(captured, roles), placed.assignments, roles)
    folded = _folded(captured, folding, roles, placed.assignments, plan)
    sharded = shard(
        captured,
        folding,
        placed.clusters,
        roles,
        placed.assignments,
        passing,
        placed.storage,
        plan,
        outputs=outputs,
        folded=folded,
    )
    settle(sharded.graph, plan.stage_mesh, narrow_dtype(plan.precision))
    return split_stages(
        captured, folding, placed.clusters, sharded, placed.storage, placed.shard_axes, plan, outputs=outputs
    )


def place(captured: CapturedModel, plan: Plan) -> Placement:
    """The model that ``plan`` was made for, under it."""
    captured = limit_experts(captured, plan.expert_capacity)
    roles = _roles(captured, plan)
    folding = fold(captured)
    clusters = cluster(captured, folding, roles)
    assignments = assign(captured, folding, clusters, plan)
    passing = passing_axes(find_derived(captured, roles), assignments, roles)
    storage, shard_axes = store(captured, find_uses(captured, assignments, passing), plan)
    return Placement(
        captured=captured,
        roles=roles,
        folding=folding,
        clusters=clusters,
        assignments=assignments,
        storage=storage,
        shard_axes=shard_axes,
    )


def _place_like(captured: CapturedModel, plan: Plan, like: Placement) -> Placement:
    """The model in another mode, its parameters stored and its ops placed as in ``like``. No tokens are dropped."""
    roles = _roles(captured, plan)
    folding = fold(captured)
    clusters = cluster(captured, folding, roles)
    stored = {like.captured.parameters[name].name: storage for name, storage in like.storage.items()}
    for parameter in captured.parameters.values():
        if parameter.name not in stored:
            raise PlanMismatch(
                f"{captured.name} stores {parameter.whole_names[0]} in one piece in one mode, and in several in the "
                "other: its train and eval modes use it differently.\n"
                "  expected: ops that read it alike in both modes\n  try: evaluate the plain model of full_state_dict()"
            )
    carried = carry(captured, roles, folding, clusters, plan, like.captured, like.folding, like.assignments)
    return Placement(
        captured=captured,
        roles=roles,
        folding=carried.folding,
        clusters=clusters,
        assignments=carried.assignments,
        storage={name: stored[parameter.name] for name, parameter in captured.parameters.items()},
        shard_axes=like.shard_axes,
    )


def _roles(captured: CapturedModel, plan: Plan) -> Roles:
    """Which dimensions are the batch's. Raises PlanMismatch if the batch is not the plan's or cannot be divided."""
    if captured.batch_size != plan.batch.global_size:
        raise PlanMismatch(
            f"batch: the plan is for {plan.batch.global_size} samples a step, the example inputs have "
            f"{captured.batch_size}.\n  try: example inputs with {plan.batch.global_size} rows (the global batch)"
        )
    roles = find_roles(captured)
    if plan.batch.num_microbatches > 1:
        obstacle = microbatch_obstacle(captured, roles)
        if obstacle is not None:
            raise PlanMismatch(f"batch: cannot be cut into {plan.batch.num_microbatches} microbatches: {obstacle}")
    return roles


def _folded(
    captured: CapturedModel, folding: Folding, roles: Roles, assignments: Mapping[fx.Node, Assignment], plan: Plan
) -> FoldedSequence | None:
    """How the sequence is folded; None in natural order. Raises PlanMismatch if it cannot be folded."""
    if plan.sequence_layout == "contiguous":
        return None
    folded = find_folds(captured, folding, roles)
    reason = folded.obstacle
    if reason is None:
        ranks = folded.num_folds(assignments, plan.stage_mesh)
        if ranks > 1 and not folded.divides(ranks):
            reason = f"{folded.length} positions do not divide into 2 chunks for each of {ranks} ranks"
    if reason is not None:
        raise PlanMismatch(
            f"sequence_layout: {captured.name} cannot be run in zigzag order: {reason}.\n"
            "  try: sequence_layout: contiguous"
        )
    return folded
