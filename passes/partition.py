"""Partitioning: from a captured model and a plan to one program per pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import fx

from autopar.ir.blocks import Folding, fold
from autopar.ir.capacity import limit_experts
from autopar.ir.clusters import cluster
from autopar.ir.derived import find_derived, passing_axes
from autopar.ir.errors import PlanMismatch
from autopar.ir.folds import FoldedSequence, find_folds
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.precision import narrow_dtype
from autopar.ir.program import StageProgram
from autopar.ir.roles import Roles, find_roles, microbatch_obstacle
from autopar.ir.rule import Assignment
from autopar.passes.assign import assign
from autopar.passes.parameters import find_uses, store
from autopar.passes.settle import settle
from autopar.passes.shard import shard
from autopar.passes.split import split_stages


def partition(
    captured: CapturedModel,
    plan: Plan,
    *,
    outputs: Literal["loss", "model"] = "loss",
) -> tuple[StageProgram, ...]:
    """The local program of every stage of ``plan``.

    outputs: "loss" for a training step (the captured loss alone), "model" for a plain forward.
    Raises PlanMismatch or InvalidPlan, saying why the plan does not fit the model.
    """
    if outputs == "loss" and not captured.has_loss:
        raise PlanMismatch(
            f"{captured.name} has no loss: its output is not a scalar and has no .loss.\n"
            "  try: pass loss_fn=..., or labels among the example inputs"
        )
    if captured.batch_size != plan.batch.global_size:
        raise PlanMismatch(
            f"batch: the plan is for {plan.batch.global_size} samples a step, the example inputs have "
            f"{captured.batch_size}.\n  try: example inputs with {plan.batch.global_size} rows (the global batch)"
        )
    captured = limit_experts(captured, plan.expert_capacity)
    roles = find_roles(captured)
    if plan.batch.num_microbatches > 1:
        obstacle = microbatch_obstacle(captured, roles)
        if obstacle is not None:
            raise PlanMismatch(f"batch: cannot be cut into {plan.batch.num_microbatches} microbatches: {obstacle}")
    folding = fold(captured)
    clusters = cluster(captured, folding, roles)
    assignments = assign(captured, folding, clusters, plan)
    passing = passing_axes(find_derived(captured, roles), assignments, roles)
    uses = find_uses(captured, assignments, passing)
    storage, shard_axes = store(captured, uses, plan)
    folded = _folded(captured, folding, roles, assignments, plan)
    sharded = shard(
        captured, folding, clusters, roles, assignments, passing, storage, plan, outputs=outputs, folded=folded
    )
    settle(sharded.graph, plan.stage_mesh, narrow_dtype(plan.precision))
    return split_stages(captured, folding, clusters, sharded, storage, shard_axes, plan, outputs=outputs)


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
