"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.search.outer.configuration import Candidate
from autopar.search.predict.predict import Predicted
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The best plan of a kind that needs no search.

    configuration: in words. step_time_s: None if nothing of the kind fits. at_least: whether that is a lower bound
    or an estimate, as the baseline was pruned.
    """

    name: str
    configuration: str
    step_time_s: float | None
    at_least: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found.

    predicted: its prediction in full (``plan.prediction`` is the part that the file keeps). optimality_gap: at most
    this share of ``predicted.step_time_s`` could be saved by another plan of the search space, as far as lower bounds
    prove. num_configurations: configurations whose inner problem was solved; num_skipped: configurations that a bound
    excluded. baselines: what the plan was compared with, the fastest first; none is faster. interrupted: by the user,
    before it was done. workload, cluster, constraints: what was searched. candidates: every plan that was found to fit,
    as they were found.
    """

    plan: Plan
    predicted: Predicted
    optimality_gap: float
    num_configurations: int
    num_skipped: int
    search_time_s: float
    workload: Workload = field(repr=False, compare=False)
    cluster: Cluster = field(repr=False, compare=False)
    constraints: Constraints = field(repr=False, compare=False)
    baselines: tuple[Baseline, ...] = ()
    interrupted: bool = False
    candidates: tuple[Candidate, ...] = field(default=(), repr=False, compare=False)
