"""Plans for several batches and lengths from one capture, and which plan is best over a mixture of lengths.

captured once, with symbols  ->  captured_at(256, 2048)  ->  search  ->  a plan for each size
                                 captured_at(256, 8192)  ->  search
every plan at every length   ->  the one with the least seconds over the steps of a mixture
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
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
from autopar.search.api import estimate_captured, predict_plan, search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult

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
    often the model was traced."""

    found: tuple[SizedPlan, ...]
    mixed: tuple[MixedPlan, ...]
    capture_time_s: float
    search_time_s: float
    num_captures: int


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
    captures = _Captures(model, inputs_of, (batches[-1], lengths[-1]), (batches[0], lengths[0]), name)
    capture_s, start = captures.seconds, time.perf_counter()
    search = estimate_captured if pin_degrees else search_captured
    found, mixed = [], []
    for batch in batches:
        own = []
        for length in lengths:
            captured = captures.at(batch, length)
            size = f"{captured.batch_size} samples" + ("" if length is None else f" of {length}")
            progress(f"searching plans for {size}")
            try:
                result, reason = search(captured, cluster, constraints), ""
            except InfeasiblePlan as error:
                result, reason = None, str(error)
            own.append(SizedPlan(batch=captured.batch_size, length=length, result=result, reason=reason))
        found += own
        best = _best_over(own, cluster, shares or [1.0] * len(lengths))
        mixed += [] if best is None else [best]
    return SizedPlans(
        found=tuple(found),
        mixed=tuple(mixed),
        capture_time_s=captures.seconds,
        search_time_s=time.perf_counter() - start - (captures.seconds - capture_s),
        num_captures=captures.count,
    )


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
        self._tensors = _tensors(inputs_of(*size))
        self._known = {size: self._capture(*size, symbolic=size != other)}
        self._symbolic: CapturedModel | None = None
        symbolic = self._known[size]
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


def _best_over(found: Sequence[SizedPlan], cluster: Cluster, shares: Sequence[float]) -> MixedPlan | None:
    """Of the plans for one batch that with the least seconds over all lengths; None if none fits them all."""
    best: MixedPlan | None = None
    if len(found) == 1 or any(own.result is None for own in found):
        return None
    for own in found:
        assert own.result is not None
        times = {other.length: _step_time(own.result.plan, other, cluster) for other in found}
        mean = sum(share * times[other.length] for share, other in zip(shares, found, strict=True)) / sum(shares)
        if mean < (inf if best is None else best.step_time_s):
            best = MixedPlan(batch=own.batch, length=own.length, plan=own.result.plan, step_time_s=mean, at=times)
    return best


def _step_time(plan: Plan, size: SizedPlan, cluster: Cluster) -> float:
    """Seconds of a step of ``plan`` at another length; infinite where it does not fit."""
    assert size.result is not None
    workload, constraints = size.result.workload, size.result.constraints
    try:
        predicted = predict_plan(workload.captured, cluster, plan, workload=workload)
    except (InvalidPlan, PlanMismatch):
        return inf
    budget = cluster.device.usable_bytes * constraints.memory_fraction
    return predicted.step_time_s if predicted.peak_bytes <= budget else inf
