"""Searches at several batches and lengths, which share what they can: captures, analyses, prices, good plans.

captured_at(512, 2048)  ->  prices  ->  search 256   in full
                                    ->  search 512   from the best configurations of that
captured_at(512, 8192)  ->  prices  ->  search 256   likewise

Batches of one length share an analysis and its prices: a microbatch is a part of a batch that all of them divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.errors import InfeasiblePlan, InvalidPlan, PlanMismatch
from autopar.ir.plan import Plan
from autopar.planning_rows import search_rows
from autopar.search.api import estimate_captured, predict_plan, prices_of, search_captured
from autopar.search.outer.known_configurations import Known, best_of
from autopar.search.outer.prices import Prices
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult
from autopar.sized_captures import Size, SizedCaptures


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlan:
    """The best plan for one size. plan: None where nothing fits, for the ``reason``."""

    batch: int
    length: int | None
    plan: Plan | None = field(repr=False)
    reason: str = ""


class Found(NamedTuple):
    """The best plan for one size, and the best few as a beginning for others."""

    plan: SizedPlan
    known: tuple[Known, ...]


@dataclass(slots=True, kw_only=True)
class SizedSearches:
    """Searches at any size. whole: a batch that all batches divide. progress: called with what is done."""

    captures: SizedCaptures
    whole: int | None
    cluster: Cluster
    constraints: Constraints
    pin_degrees: bool
    progress: Callable[..., None]
    _known: dict[Size, Prices] = field(default_factory=dict)
    _other_layout: dict[int | None, Prices] = field(default_factory=dict)

    def in_full(self, size: Size) -> Found:
        """The best plan for one size."""
        return self._search(size, ())

    def nearby(self, size: Size, known: Sequence[Known]) -> Found:
        """The best plan for one size, searched from good plans for others."""
        return self._search(size, known)

    def times_s(self, plans: Sequence[Plan], length: int | None) -> list[float]:
        """Seconds of a step of each plan at a length; infinite where it does not fit."""
        return [self._step_time_s(plan, length) for plan in plans]

    def captured(self) -> tuple[float, int]:
        """Seconds spent on captures, and how often the model was traced."""
        return self.captures.seconds, self.captures.count

    def _search(self, size: Size, known: Sequence[Known]) -> Found:
        batch, length = size
        samples = batch or self._prices(size).workload.captured.batch_size
        self.progress(f"searching plans for {samples} samples" + ("" if length is None else f" of {length}"))
        searched = estimate_captured if self.pin_degrees else search_captured

        def search(rows: int, limits: Constraints) -> SearchResult:
            prices = self._prices_of(batch, rows, length)
            return searched(
                prices.workload.captured,
                self.cluster,
                limits,
                prices=prices,
                batch_size=rows,
                samples=samples,
                known=tuple(known),
            )

        try:
            result = search_rows(
                samples,
                self.cluster.num_gpus,
                self.constraints,
                search=search,
                symbolic=lambda: self.captures.symbolic_at(batch, length),
            )
        except InfeasiblePlan as error:
            return Found(SizedPlan(batch=samples, length=length, plan=None, reason=str(error)), ())
        return Found(SizedPlan(batch=samples, length=length, plan=result.plan), best_of(result.candidates))

    def _prices(self, size: Size) -> Prices:
        """Prices of a step, as a part of the batch that they all divide where the batch may be cut."""
        batch, length = size
        found = self._known.get((self.whole, length)) or self._made(self.whole, length)
        if found.workload.analysis.obstacle is not None:
            found = self._known.get(size) or self._made(batch, length)
        return found

    def _prices_of(self, batch: int | None, rows: int, length: int | None) -> Prices:
        """Prices of a step of ``batch``, under a plan for so many rows, which may be a few more."""
        if batch is None or rows == batch:
            return self._prices((batch, length))
        return self._known.get((rows, length)) or self._made(rows, length)

    def _made(self, batch: int | None, length: int | None) -> Prices:
        limits = self.constraints
        (recipe,) = limits.recipes
        captured = self.captures.at(batch, length)
        workload = Workload.of(captured, limits.precision, limits.expert_capacity, recipe, limits.recipe_pins)
        found = self._known[batch, length] = prices_of(workload, self.cluster, limits)
        return found

    def _step_time_s(self, plan: Plan, length: int | None) -> float:
        prices = self._prices_of(plan.batch.global_size, plan.planned_rows, length)
        zigzag = plan.sequence_layout == "zigzag"
        if prices.balanced is not zigzag:
            other = self._other_layout.get(length)
            if other is None or other.workload is not prices.workload:
                other = Prices(prices.workload, self.cluster, zigzag, self.constraints.expert_load)
                self._other_layout[length] = other
            prices = other
        try:
            predicted = predict_plan(prices.workload.captured, self.cluster, plan, prices=prices)
        except (InvalidPlan, PlanMismatch):
            return inf
        budget = self.cluster.device.usable_bytes * self.constraints.memory_share
        return predicted.step_time_s if predicted.peak_bytes <= budget else inf
