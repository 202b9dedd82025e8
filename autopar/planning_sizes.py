"""Plans for several batches and lengths from one capture, and which plan is best over a mixture of lengths.

captured once, with symbols  ->  captured_at(512, 2048)  ->  prices  ->  search 256  ->  a plan for each size
                                                                     ->  search 512
                                 captured_at(512, 8192)  ->  prices  ->  search 256 ...
every plan at every length   ->  the one with the least seconds over the steps of a mixture

Batches of one length share an analysis and its prices: a microbatch is a part of a batch that all of them divide. Each
search but the first begins with the best configurations of those before it, instead of baselines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, lcm
from typing import Any

import torch
from torch import nn

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.capture.capture import capture
from autopar.ir.capture.other_sizes import captured_at, same_program
from autopar.ir.capture.symbols import named_dims
from autopar.ir.errors import CaptureError, InfeasiblePlan, InvalidPlan, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.torch_private import pytree
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, predict_plan, prices_of, search_captured
from autopar.search.outer.known_configurations import Known, best_of
from autopar.search.outer.prices import Prices
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult

# Configurations of earlier searches that one begins with. Chosen.
MOST_KNOWN = 6

# The inputs of a model for a global batch and a length; None for the model's own.
InputsOf = Callable[[int | None, int | None], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlan:
    """The best plan for one size. result: None where nothing fits, for the ``reason``."""

    batch: int
    length: int | None
    result: SearchResult | None = field(repr=False)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """The plan of one batch that takes the fewest seconds over a mixture of lengths.

    length: that it was searched for. step_time_s: of a step, the mean over the mixture; at: of each length.
    """

    batch: int
    length: int | None
    plan: Plan
    step_time_s: float
    at: Mapping[int | None, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlans:
    """found: by batch, then length. mixed: one for each batch for which a plan fits all lengths. num_captures: how
    often the model was traced. fixed: names of sizes at each of which it was traced -> why, with the line of the model
    that makes a number of it."""

    found: tuple[SizedPlan, ...]
    mixed: tuple[MixedPlan, ...]
    capture_time_s: float
    search_time_s: float
    num_captures: int
    fixed: Mapping[str, str] = field(default_factory=dict)


def find_plans(
    model: nn.Module,
    cluster: Cluster,
    inputs_of: InputsOf,
    batches: Sequence[int | None],
    lengths: Sequence[int | None],
    *,
    shares: Sequence[float] | None = None,
    constraints: Constraints | None = None,
    pin_degrees: bool = False,
    name: str | None = None,
    progress: Callable[..., None] = lambda doing, share=None: None,
) -> SizedPlans:
    """The best plan under ``constraints`` for every batch and length.

    model: on any device, meta included. shares: shares of the steps that have each of ``lengths``; equal ones if it is
    not given. pin_degrees: as ``planning.find_plan`` has it. Raises CaptureError.
    """
    constraints = constraints or Constraints()
    progress("capturing the model")
    whole = _common(batches)
    captures = _Captures(model, inputs_of, (whole, lengths[-1]), (batches[0], lengths[0]), name)
    capture_s, start = captures.seconds, time.perf_counter()
    search = estimate_captured if pin_degrees else search_captured
    at = [_Length(captures, length, whole, cluster, constraints) for length in lengths]
    found: dict[tuple[int | None, int | None], SizedPlan] = {}
    ends: tuple[Known, ...] = ()
    latest: tuple[Known, ...] = ()

    def find(place: _Length, batch: int | None, *, is_end: bool) -> None:
        nonlocal ends, latest
        prices = place.prices(batch)
        captured = prices.workload.captured
        size = batch or captured.batch_size
        progress(f"searching plans for {size} samples" + ("" if place.length is None else f" of {place.length}"))
        result, reason = None, ""
        try:
            known = () if is_end else (*latest, *ends)
            result = search(captured, cluster, constraints, prices=prices, batch_size=size, known=known)
            if is_end:
                ends += best_of(result.candidates)
            else:
                latest = (*best_of(result.candidates), *latest)[:MOST_KNOWN]
        except InfeasiblePlan as error:
            reason = str(error)
        found[batch, place.length] = SizedPlan(batch=size, length=place.length, result=result, reason=reason)

    # The least and the most work first, each searched in full: the others begin with what is good there.
    order = [(place, batch) for place in at for batch in batches]
    for number, (place, batch) in enumerate((order[-1], *order[:-1])):
        find(place, batch, is_end=number < 2)
    by_batch = [[(found[batch, place.length], place) for place in at] for batch in batches]
    mixed = [_best_over(own, shares or [1.0] * len(lengths)) for own in by_batch]
    return SizedPlans(
        found=tuple(one for own in by_batch for one, _ in own),
        mixed=tuple(one for one in mixed if one is not None),
        capture_time_s=captures.seconds,
        search_time_s=time.perf_counter() - start - (captures.seconds - capture_s),
        num_captures=captures.count,
        fixed=captures.fixed,
    )


def _common(batches: Sequence[int | None]) -> int | None:
    """The least batch that all of ``batches`` divide: a step of each is a part of it."""
    given = [batch for batch in batches if batch is not None]
    return lcm(*given) if given else None


@dataclass(slots=True)
class _Length:
    """What all searches at one length share."""

    captures: _Captures
    length: int | None
    whole: int | None
    cluster: Cluster
    constraints: Constraints
    _known: dict[int | None, Prices] = field(default_factory=dict)
    _other_layout: Prices | None = None

    def prices(self, batch: int | None) -> Prices:
        """Prices of a step of ``batch``, as a part of the batch that they all divide where the batch may be cut."""
        found = self._known.get(self.whole) or self._made(self.whole)
        if found.workload.analysis.obstacle is not None:
            found = self._known.get(batch) or self._made(batch)
        return found

    def _made(self, batch: int | None) -> Prices:
        limits = self.constraints
        workload = Workload.of(self.captures.at(batch, self.length), limits.precision, limits.expert_capacity)
        found = self._known[batch] = prices_of(workload, self.cluster, limits)
        return found

    def step_time_s(self, plan: Plan) -> float:
        """Seconds of a step of ``plan`` at this length; infinite where it does not fit."""
        prices, zigzag = self.prices(plan.batch.global_size), plan.sequence_layout == "zigzag"
        if prices.balanced is not zigzag:
            if self._other_layout is None or self._other_layout.workload is not prices.workload:
                self._other_layout = Prices(prices.workload, self.cluster, zigzag, self.constraints.expert_load)
            prices = self._other_layout
        try:
            predicted = predict_plan(prices.workload.captured, self.cluster, plan, prices=prices)
        except (InvalidPlan, PlanMismatch):
            return inf
        budget = self.cluster.device.usable_bytes * self.constraints.memory_fraction
        return predicted.step_time_s if predicted.peak_bytes <= budget else inf


class _Captures:
    """The model at any size: from a capture with symbols, if that is shown to hold; else captured anew."""

    def __init__(
        self,
        model: nn.Module,
        inputs_of: InputsOf,
        size: tuple[int | None, int | None],
        other: tuple[int | None, int | None],
        name: str | None,
    ) -> None:
        """size: of the capture with symbols. other: at which it is compared with a capture of that size."""
        self._model, self._inputs_of, self._name = model, inputs_of, name
        self.seconds, self.count = 0.0, 0
        self.fixed: Mapping[str, str] = {}
        self._tensors = _tensors(inputs_of(*size))
        self._known = {size: self._capture(*size, symbolic=size != other)}
        self._symbolic: CapturedModel | None = None
        symbolic = self._known[size]
        self.fixed = symbolic.fixed
        if size != other:
            self._known[other] = self._capture(*other)
            self._symbolic = symbolic
            at = self._at(*other)
            if at is None or not same_program(at, self._known[other]):
                self._symbolic = None
            del self._known[size]

    def at(self, batch: int | None, length: int | None) -> CapturedModel:
        """The capture of one size, in normal form."""
        if (batch, length) not in self._known:
            start = time.perf_counter()
            found = self._at(batch, length)
            self.seconds += time.perf_counter() - start
            self._known[batch, length] = self._capture(batch, length) if found is None else found
        return self._known[batch, length]

    def _at(self, batch: int | None, length: int | None) -> CapturedModel | None:
        """From the capture with symbols; None if that holds for other sizes alone."""
        if self._symbolic is None:
            return None
        given, sizes = _tensors(self._inputs_of(batch, length)), dict[str, int]()
        for tensor, whole, names in zip(given, self._tensors, named_dims(self._tensors), strict=True):
            for dim, size in enumerate(tensor.shape):
                if dim not in names and size != whole.shape[dim]:
                    return None
                if dim in names and sizes.setdefault(names[dim], size) != size:
                    return None
        try:
            return captured_at(self._symbolic, sizes)
        except CaptureError:
            return None

    def _capture(self, batch: int | None, length: int | None, *, symbolic: bool = False) -> CapturedModel:
        start = time.perf_counter()
        captured = capture(self._model, self._inputs_of(batch, length), name=self._name, symbolic=symbolic)
        found = normalise(captured, check=not symbolic)
        self.seconds, self.count = self.seconds + time.perf_counter() - start, self.count + 1
        return found


def _tensors(inputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _best_over(searched: Sequence[tuple[SizedPlan, _Length]], shares: Sequence[float]) -> MixedPlan | None:
    """Of the plans for one batch that with the least seconds over all lengths; None if none fits them all."""
    best: MixedPlan | None = None
    if len(searched) == 1 or any(own.result is None for own, _ in searched):
        return None
    tried = set[str]()
    for own, _ in searched:
        assert own.result is not None
        plan = own.result.plan
        same = plan.model_copy(update={"prediction": None}).model_dump_json()
        if same in tried:
            continue
        tried.add(same)
        times = {place.length: place.step_time_s(plan) for _, place in searched}
        weighted = (share * times[place.length] for share, (_, place) in zip(shares, searched, strict=True))
        mean = sum(weighted) / sum(shares)
        if mean < (inf if best is None else best.step_time_s):
            best = MixedPlan(batch=own.batch, length=own.length, plan=plan, step_time_s=mean, at=times)
    return best
