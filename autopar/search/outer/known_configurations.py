"""The best plans for other sizes of a model, as a first guess for one more.

plan for 256 samples  ->  its mesh, ZeRO and assignment, with microbatches as large, or as many  ->  priced at this size
                          the best one of those                                                  ->  solved at this size
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.ir.rule import Assignment
from autopar.search.outer.baselines import Trials
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.space import Space
from autopar.search.pricing.pricing import Pricing

# At most so many plans of one search are tried at another size: an assumed value.
MAX_KNOWN = 3


class Known(NamedTuple):
    """A good plan. assignment: of each op cluster, by its index. samples: of a step, tokens: of a step. schedule: with
    its virtual stages."""

    configuration: Configuration
    assignment: tuple[Assignment, ...]
    samples: int
    tokens: float
    schedule: tuple[str, int]


def best_of(candidates: Sequence[Candidate]) -> tuple[Known, ...]:
    """The fastest of ``candidates``, one of each configuration."""
    found: dict[Configuration, Known] = {}
    for own in sorted(candidates, key=lambda one: one.step_time_s):
        size = own.pricing.batch_size, own.pricing.num_tokens
        schedule = own.configuration.schedule, own.configuration.virtual_stages
        found.setdefault(own.configuration, Known(own.configuration, own.assignment, *size, schedule))
    return tuple(found.values())[:MAX_KNOWN]


def at_batch(known: Iterable[Known], space: Space) -> Iterator[Known]:
    """Those plans in ``space``: with as many samples in a microbatch as there, as many tokens, and as many
    microbatches."""
    tried = set[tuple[Configuration, tuple[Assignment, ...]]]()
    size = space.solver.batch_size, space.solver.num_tokens
    for own, assignment, samples, tokens, schedule in known:
        options = space.microbatches(own.mesh, own.constraints)
        for larger in (size[0] / samples, size[1] / tokens, 1.0):
            goal = own.num_microbatches * larger
            for num in sorted(options, key=lambda num: (max(num / goal, goal / num), num))[:1]:
                for root in space.roots(own.num_stages, own.mesh, num, own.constraints):
                    found = replace(root, zero=own.zero, data_axes=own.data_axes, batch_axes=own.batch_axes)
                    found = replace(found, offload=space.offload)
                    if own.offload == space.offload and (found, assignment) not in tried:
                        tried.add((found, assignment))
                        yield Known(found, assignment, *size, schedule)


def divides(pricing: Pricing, assignment: tuple[Assignment, ...]) -> bool:
    """Whether an assignment divides every factor of every op at the sizes of ``pricing``."""
    groups = pricing.workload.clusters.clusters
    if len(groups) != len(assignment):
        return False
    for group, own in zip(groups, assignment, strict=True):
        if any(choice not in group.choices for choice in own):
            return False
        picks = np.array([[group.choices.index(choice) for choice in own]], dtype=np.int64)
        if not pricing.ops.codes.allows(group, picks, pricing.mesh, pricing.parts).all():
            return False
    return True


def try_known(outer: Trials, known: Sequence[Known]) -> None:
    """Price the plans for other sizes at this one, each under its own schedule or, where it does not fit so, the first
    that it fits with; solve the configuration of the best under every schedule, and those beside it."""
    found: dict[Configuration, tuple[float, Inner]] = {}
    for configuration, assignment, _, _, schedule in at_batch(known, outer.space):
        pricing = outer.solver.pricing(configuration)
        if outer.known_of(configuration) is None and divides(pricing, assignment):
            once = configuration.num_stages == 1
            inner = Inner(pricing=pricing, assignment=assignment, objective=inf, shared_once=once)
            plan = outer.consider(configuration, inner, relaxed=True, try_first=schedule)
            if plan is not None and (configuration not in found or plan.step_time_s < found[configuration][0]):
                found[configuration] = plan.step_time_s, inner
    if found:
        best = min(found, key=lambda one: found[one][0])
        if best.num_stages > 1:
            outer.consider(best, found[best][1])
        outer.try_baseline(best)
    for configuration in outer.space.near(outer.best.configuration) if outer.best is not None else ():
        if configuration not in found:
            outer.try_baseline(configuration)
