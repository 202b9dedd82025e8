"""A plan together with its model and its cluster: facts for a report that the plan file does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.rule import Assignment
from autopar.planning import Planned
from autopar.report.sensitivity import Variation, variations
from autopar.search.api import priced_plan
from autopar.search.predict.predict import Predicted, predict
from autopar.search.predict.to_plan import prediction_of
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """plan: as predicted now; pricing, assignment, predicted: of it. planned: how it was found, if it was found just
    now.

    variations: the best plans of other clusters and batches, if they were searched.
    """

    plan: Plan
    pricing: Pricing
    assignment: tuple[Assignment, ...]
    predicted: Predicted
    planned: Planned | None = None
    variations: tuple[Variation, ...] = ()

    @property
    def workload(self) -> Workload:
        """The analysed model."""
        return self.pricing.workload

    @property
    def cluster(self) -> Cluster:
        """The cluster of the plan."""
        return self.pricing.ops.cluster

    @property
    def result(self) -> SearchResult | None:
        """Result of the search that found the plan; None if it was read from a file."""
        return None if self.planned is None else self.planned.result

    @property
    def capacity_bytes(self) -> float:
        """Memory of a rank that a plan may take."""
        share = 1.0 if self.result is None else self.result.constraints.memory_share
        return self.cluster.device.usable_bytes * share


def study_plan(captured: CapturedModel, cluster: Cluster, plan: Plan, *, workload: Workload | None = None) -> Study:
    """A plan that is predicted again, for instance one from a file. It is taken to fit the model."""
    pricing, assignment, stages = priced_plan(captured, cluster, plan, workload=workload)
    predicted = predict(pricing, assignment, evaluate_stages(pricing, assignment, stages), stages, plan.pipelining)
    return Study(
        plan=plan.model_copy(
            update={
                "prediction": prediction_of(pricing, predicted, plan.data_parallel_size, samples=plan.batch.global_size)
            }
        ),
        pricing=pricing,
        assignment=assignment,
        predicted=predicted,
    )


def study_found(
    planned: Planned,
    *,
    vary: bool = True,
    progress: Callable[..., None] = lambda doing, share=None: None,
) -> Study:
    """A plan that was just found. vary: search the best plans of other networks, memories and batches too."""
    result = planned.result
    workload = result.workload
    study = study_plan(workload.captured, result.cluster, result.plan, workload=workload)
    return replace(study, planned=planned, variations=variations(planned, progress=progress) if vary else ())
