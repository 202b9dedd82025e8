"""What is predicted of a published run: under the plan that it prints, or under the best that has what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.fitted_constants import FITTED, Fitted
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.rules.moe import EXPERTS
from autopar.search.api import estimate_captured, predict_plan, search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.forbidden_placements import Forbidden, deciding_ops
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult
from benchmarks.published_rows import Missing, Row

ENOUGH = 1 << 50


def workload_of(row: Row, captured: CapturedModel) -> Workload:
    """A captured model in the row's dtype, recipe and order of ending."""
    return replace(Workload.of(captured, row.dtype, recipe=row.recipe), ends_early=row.origin.ends_early)


def devices_of(row: Row, fitted: Fitted = FITTED) -> Cluster:
    """Its GPUs under its software, with the network that its source states."""
    made = make_cluster(row.gpu, row.number("n_gpus"), fitted=fitted, stack=row.stack)
    network = row.origin.network
    return made if network is None else replace(made, inter_node=network)


def roomy_cluster(row: Row, fitted: Fitted = FITTED) -> Cluster:
    """The devices, with memory for whatever was run."""
    return devices_of(row, fitted).with_memory(ENOUGH)


def _dispatching(row: Row, workload: Workload) -> Constraints:
    """The plan, with tokens dispatched to experts that are whole."""
    given = row.constraints()
    if row.whole_experts and row.expert_ranks > 1:
        given = replace(given, forbidden=tuple(undispatched(workload)))
    return given


def under_its_plan(
    row: Row,
    captured: CapturedModel,
    workload: Workload | None = None,
    fitted: Fitted = FITTED,
    **other: Any,
) -> SearchResult:
    """The prediction, with memory for whatever was run. other: constraints instead of those that are printed.
    Raises Missing where the plan is printed in part alone, and AutoparError where it cannot be."""
    if row.unprinted:
        raise Missing(", ".join(row.unprinted))
    workload = workload or workload_of(row, captured)
    cluster = roomy_cluster(row, fitted)
    constraints = replace(_dispatching(row, workload), **other)
    found = estimate_captured(captured, cluster, constraints, workload=workload)
    if "every other layer" in row.recompute:
        plan = every_other_block_again(found.plan)
        found = replace(found, plan=plan, predicted=predict_plan(captured, cluster, plan, workload=workload))
    return found


def for_its_memory(row: Row, captured: CapturedModel, **other: Any) -> SearchResult:
    """As ``under_its_plan``, with the state of a distributed optimiser on all data-parallel ranks, also of those that
    share a sequence. The fastest plan may have copies of it, which takes memory that such runs did not."""
    ranks = row.number("dp") * row.number("cp", 1)
    if row.zero_stage_or_fsdp == "zero1" and ranks > 1:
        other["shard"] = ranks
    return under_its_plan(row, captured, **other)


def under_the_best_plan(row: Row, captured: CapturedModel) -> SearchResult:
    """The fastest plan that has what is printed, and fits; if none is thought to fit, with memory for whatever was
    run. Raises AutoparError where there is none at all."""
    try:
        return _best_plan(row, captured, devices_of(row))
    except InfeasiblePlan:
        return _best_plan(row, captured, roomy_cluster(row))


def _best_plan(row: Row, captured: CapturedModel, cluster: Cluster) -> SearchResult:
    workload = workload_of(row, captured)
    given = _dispatching(row, workload)
    schedules: tuple[Any, ...] = ("1f1b", "interleaved") if given.pp is None else (given.schedule,)
    each = [replace(given, schedule=schedule) for schedule in schedules]
    found = [search_captured(captured, cluster, one, workload=workload) for one in each]
    return min(found, key=lambda one: one.predicted.step_time_s)


def undispatched(workload: Workload) -> Iterator[Forbidden]:
    """Every placement of experts on their own axis but that to which tokens are dispatched."""
    for block, op, node in deciding_ops(workload):
        if EXPERTS in (rule := workload.rule(node)).sizes:
            first = rule.joint[0]
            for choice in workload.cluster_of(node).choices:
                if choice != first:
                    yield Forbidden(pattern=f"{block}/{op}", placement=(("ep", choice),))


def every_other_block_again(plan: Plan) -> Plan:
    """Half the blocks of every stage rematerialised; which of them makes no difference to the time."""
    stages = [
        stage.model_copy(update={"remat": {"full": (stage.last - stage.first + 1) // 2}}) for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": stages, "prediction": None})
