"""From a model and a cluster to a plan: capture, normalise, search, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.hardware.cluster import Cluster
from autopar.garbage import collector_paused
from autopar.ir.capture.capture import capture
from autopar.ir.capture.example_inputs import at_sizes
from autopar.ir.capture.symbols import BATCH
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.planning_rows import search_rows
from autopar.search.api import estimate_captured, search_captured
from autopar.search.divided_share import DividedFlops, divided_by_axes
from autopar.search.outer.best_first import Progress
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult
from autopar.units import plural, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The result of a search, its model, and the seconds of capture and normalisation before it.

    constraints, pin_degrees: as given. capture_batch: captures the model for another global batch, if it can be.
    """

    result: SearchResult
    capture_time_s: float
    captured: CapturedModel = field(repr=False)
    constraints: Constraints = field(default_factory=Constraints)
    pin_degrees: bool = False
    capture_batch: Callable[[int], CapturedModel] | None = field(default=None, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan found."""
        return self.result.plan

    def divided(self) -> list[DividedFlops]:
        """Share of its work that each axis for tensors or experts divides."""
        return divided_by_axes(self.captured, self.plan, workload=self.result.workload)


@collector_paused()
def find_plan(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: Any,
    *,
    inputs_of: Callable[[int], Any] | None = None,
    constraints: Constraints | None = None,
    pin_degrees: bool = False,
    documents_of: Callable[[CapturedModel], Documents | None] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    example_target: Any = None,
    name: str | None = None,
    progress: Callable[..., None] = lambda doing, share=None: None,
) -> Planned:
    """The best plan under ``constraints``.

    model: on any device, meta included; only its structure is read. example_inputs: of one global batch. inputs_of: of
    a global batch of so many samples, for whoever wants to plan for another one.
    pin_degrees: degrees that are not given are 1, and data parallelism takes the ranks left over; nothing but
    microbatches, ZeRO and rematerialisation is searched. documents_of: that are packed into the rows of the model as
    captured. progress: called with what is being done and,
    during the search, how much of it is done at most.
    Raises CaptureError or InfeasiblePlan.
    """
    constraints = constraints or Constraints()
    progress("capturing the model")
    start = time.perf_counter()

    def captured_with(inputs: Any, target: Any, symbolic: bool = False) -> CapturedModel:
        options = {"loss_fn": loss_fn, "example_target": target, "name": name, "symbolic": symbolic}
        return normalise(capture(model, inputs, **options), check=not symbolic)

    captured = captured_with(example_inputs, example_target)
    capture_time_s = time.perf_counter() - start
    if documents_of is not None:
        constraints = replace(constraints, documents=documents_of(captured))
    searching = f"searching plans for {cluster.num_gpus} × {cluster.device.name}"
    progress(searching)

    def report(now: Progress) -> None:
        best = "no plan yet" if now.best_s is None else f"best {seconds(now.best_s)} a step"
        left = f", {plural(now.num_left, 'configuration')} left" if now.num_left else ""
        progress(f"{searching}: {best}, none under {seconds(now.bound_s)}{left}", now.share)

    search = estimate_captured if pin_degrees else search_captured

    batch = captured.batch_size

    def captured_rows(rows: int) -> CapturedModel:
        if rows == batch:
            return captured
        if inputs_of is not None:
            return captured_with(inputs_of(rows), example_target)
        return captured_with(*at_sizes(model, example_inputs, loss_fn, example_target, {BATCH: rows}))

    result = search_rows(
        batch,
        cluster.num_gpus,
        constraints,
        search=lambda rows, limits: search(captured_rows(rows), cluster, limits, samples=batch, report=report),
        symbolic=lambda: captured_with(example_inputs, example_target, symbolic=True),
    )
    return Planned(
        result=result,
        capture_time_s=capture_time_s,
        captured=result.workload.captured,
        constraints=constraints,
        pin_degrees=pin_degrees,
        capture_batch=None if inputs_of is None else lambda size: captured_with(inputs_of(size), example_target),
    )
