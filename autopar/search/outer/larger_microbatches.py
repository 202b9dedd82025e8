"""Larger microbatches for a plan of which activations wait in host memory.

The search finds numbers of microbatches with the four levels of rematerialisation, under which the memory of a device
limits their size. Where activations wait in host memory instead, fewer and larger ones may fit, which gather parameters
less often: their number is halved as long as that is faster.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.search.outer.configuration import Candidate, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.kept_sets import GAIN, kept_sets
from autopar.search.outer.offloads import has_room
from autopar.search.pricing.build_instance import Weights
from autopar.search.problem.constraints import NoOption

# Seconds that all memory of a device is worth to activations, as a share of the step: what is else as fast is divided
# as far as it can be. Chosen.
_PRICE = 0.01


def with_larger_microbatches(solver: Solver, best: Candidate) -> Candidate:
    """``best``, or a faster plan on the same mesh with fewer microbatches."""
    while (found := _with_half_as_many(solver, best)) is not None:
        best = found
    return best


def _with_half_as_many(solver: Solver, best: Candidate) -> Candidate | None:
    count, constraints = best.configuration.num_microbatches, best.configuration.constraints
    pinned = constraints.num_microbatches is not None or constraints.microbatch_size is not None
    if pinned or count % 2 or best.configuration.passes is not None or not any(best.predicted.host_bytes):
        return None
    configuration = replace(best.configuration, num_microbatches=count // 2)
    if configuration.pipelining.obstacle() is not None:
        return None
    price = _PRICE * best.predicted.step_time_s / solver.budget_bytes
    try:
        inner = solver.inner(configuration, Weights(sync=0.0, activations=price))
    except NoOption:
        return None
    pricing = replace(inner.pricing, kept=kept_sets(inner.pricing, inner.assignment))
    own = Inner(pricing=pricing, assignment=inner.assignment, objective=0.0, shared_once=inner.shared_once)
    record_s = best.predicted.step_time_s * (1 - GAIN)
    found = solver.filled(configuration, own, record_s)
    return found if found is not None and found.predicted.step_time_s < record_s and has_room(found) else None
