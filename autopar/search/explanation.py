"""Why an op of a plan is placed as it is: the consequences of its placement, and the cost of the next best ones.

A runner-up is the best plan with the same mesh, pipeline, schedule, microbatches and ZeRO in which the op may not have
its placement; in the next one it may have neither. All other ops, the stage cuts and
rematerialisation adapt, so the price is that of the whole plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.analysis.eight_bits import kept_wide, products_of
from autopar.ir.analysis.op_clusters import OpCluster
from autopar.ir.errors import InfeasiblePlan, InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.ir.ops.op_recipes import recipe_of
from autopar.ir.plan import Plan, Prediction, Recipe
from autopar.search.api import predict_plan, priced_plan, search_captured
from autopar.search.predict.communications import Communication, communications
from autopar.search.predict.predict import predict
from autopar.search.predict.to_plan import prediction_of
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.allowed_choices import Choices, Rules
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.constraints_of_plan import constraints_like, forbidden_like, mesh_like, with_axes_of
from autopar.search.problem.forbidden_placements import Forbidden, deciding_ops, named_ops, unknown_op
from autopar.search.problem.workload import Workload

# Networks that are tried for a runner-up to be better on: this times as fast. Chosen: the nearest first, both ways.
_SPEEDS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan with another placement of an op.

    placement: (mesh axis, factor, None for replicated). plan: with its prediction; None if nothing fits, with the
    reason. faster_with: the network's speed over the present one's, nearest to 1, at which this plan would be
    faster; None if at none that was tried.
    """

    placement: tuple[tuple[str, str | None], ...]
    plan: Plan | None
    reason: str = ""
    faster_with: float | None = None

    @property
    def prediction(self) -> Prediction | None:
        """Prediction of the plan; None if nothing fits."""
        return None if self.plan is None else self.plan.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A factor along which an axis of the mesh cannot divide an op."""

    axis: str
    factor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One op.

    plan: as predicted now. block, op: as it names them. followers: ops that are placed with this one. factors: that it
    can be divided along; excluded: on which axes it cannot. time: of the op and its followers, a microbatch on one
    rank. peak_share: of the memory that a plan may take. alternatives: the best first. recipe: of 8-bit floats, if it
    is computed in them; kept_wide: else why not, of a linear layer of a plan with some in them.
    """

    plan: Plan
    block: str
    op: str
    placement: tuple[tuple[str, str | None], ...]
    followers: tuple[str, ...]
    factors: tuple[str, ...]
    excluded: tuple[Exclusion, ...]
    time: OpTime
    communications: tuple[Communication, ...]
    peak_share: float
    alternatives: tuple[Alternative, ...]
    recipe: Recipe | None = None
    kept_wide: str | None = None


def explain_op(
    captured: CapturedModel,
    cluster: Cluster,
    plan: Plan,
    name: str,
    *,
    count: int = 2,
    progress: Callable[[str], object] = lambda doing: None,
) -> Explanation:
    """Explain the op ``name`` of ``plan`` with the ``count`` next best placements. Raises InvalidInput."""
    workload = Workload.for_plan(captured, plan)
    block, op, node = _find(workload, name)
    group = workload.cluster_of(node)
    pricing, assignment, stages = priced_plan(captured, cluster, plan, workload=workload)
    predicted = predict(pricing, assignment, evaluate_stages(pricing, assignment, stages), stages, plan.pipelining)
    plan = plan.model_copy(
        update={
            "prediction": prediction_of(pricing, predicted, plan.data_parallel_size, samples=plan.batch.global_size)
        }
    )
    time = sum(
        (pricing.op(member, group.assignment(member, assignment[group.index])) for member in group.members), ZERO
    )
    placement = _placement(plan, block, op)
    constraints = constraints_like(plan)
    alternatives: list[Alternative] = []
    forbidden = [Forbidden(pattern=f"{block}/{op}", placement=placement)]
    while len(alternatives) < count:
        progress(f"what if not {', '.join(str(one).rpartition(': ')[2] for one in forbidden)}")
        try:
            own = replace(constraints, forbidden=tuple(forbidden_like(plan, one) for one in forbidden))
            found = with_axes_of(search_captured(captured, cluster, own, workload=workload).plan, plan)
        except InfeasiblePlan as error:
            alternatives.append(Alternative(placement=(), plan=None, reason=str(error)))
            break
        other = _placement(found, block, op)
        faster = _faster_with(captured, cluster, plan, found, workload)
        alternatives.append(Alternative(placement=other, plan=found, faster_with=faster))
        forbidden.append(Forbidden(pattern=f"{block}/{op}", placement=other))
    members = set(group.members)
    return Explanation(
        plan=plan,
        block=block,
        op=op,
        placement=placement,
        followers=tuple(workload.repetition.key.get(member, member.name) for member in group.members[1:]),
        factors=tuple(choice for choice in group.choices if choice is not None),
        excluded=_excluded(plan, pricing, group, constraints),
        time=time,
        communications=tuple(
            own for own in communications(pricing, assignment) if members.intersection((own.source, *own.readers))
        ),
        peak_share=predicted.peak_bytes / (cluster.device.usable_bytes * constraints.memory_share),
        alternatives=tuple(alternatives),
        recipe=recipe_of(node),
        kept_wide=_kept_wide(workload, node),
    )


def _kept_wide(workload: Workload, node: fx.Node) -> str | None:
    """Why a linear layer is not in 8-bit floats in a plan that has some in them."""
    captured = workload.captured
    recipes = sorted(set(workload.analysis.recipes.values()))
    if not recipes or node not in products_of(captured):
        return None
    return kept_wide(captured, workload.repetition, recipes[0]).get(node, "the plan has no recipe for it")


def _find(workload: Workload, name: str) -> tuple[str, str, fx.Node]:
    """(block, op, node) that ``name`` means, as ``OP`` or ``BLOCK/OP``. Raises InvalidInput for none or several."""
    nodes = named_ops(workload, name)
    found = [(block, op, node) for block, op, node in deciding_ops(workload) if node in nodes]
    if not found:
        raise InvalidInput(unknown_op(workload, name))
    if len(found) > 1:
        names = ", ".join(f"{block}/{op}" for block, op, _ in found[:8])
        raise InvalidInput(
            f"{name!r} is {len(found)} ops: {names}{' ...' if len(found) > 8 else ''}.\n  try: one of them"
        )
    return found[0]


def _excluded(plan: Plan, pricing: Pricing, group: OpCluster, constraints: Constraints) -> tuple[Exclusion, ...]:
    rules = Rules(
        choices=Choices(pricing.workload),
        mesh=mesh_like(plan),
        constraints=constraints,
        data_axes=pricing.data_axes if plan.zero else (),
    )
    return tuple(
        Exclusion(axis=name, factor=choice, reason=reason)
        for axis, (name, size) in enumerate(plan.mesh.items())
        for choice in group.choices
        if size > 1 and choice is not None and (reason := rules.refusal(group, axis, choice))
    )


def _placement(plan: Plan, block: str, op: str) -> tuple[tuple[str, str | None], ...]:
    axes = next(own for own in plan.blocks if own.name == block).ops.get(op, {})
    return tuple((axis, axes.get(axis)) for axis, size in plan.mesh.items() if size > 1)


def _faster_with(
    captured: CapturedModel, cluster: Cluster, plan: Plan, other: Plan, workload: Workload
) -> float | None:
    """The first of the speeds of the network at which ``other`` would be faster than ``plan``."""
    for speed in _SPEEDS:
        there = cluster.with_network(speed)
        now, then = (predict_plan(captured, there, each, workload=workload).step_time_s for each in (plan, other))
        if then < now:
            return speed
    return None
