"""Other schedules for a plan whose ops and mesh are fixed, with rematerialisation under each.

The search of all plans tries schedules that split the backward without rematerialisation, as there are many to cut, and
chooses among the others by what the levels of rematerialisation cost. The best plans are cut for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from autopar.ir.schedule import Pipelining
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver


def with_split_backward(solver: Solver, found: Candidate) -> Candidate:
    """``found``, or a faster plan under a schedule that has a name, splits the backward and rematerialises."""
    if solver.levels == ("none",):
        return found
    return best_schedule(solver, found.configuration, Inner.of(found), found, split_alone=True) or found


def best_schedule(
    solver: Solver,
    configuration: Configuration,
    inner: Inner,
    best: Candidate | None,
    *,
    split_alone: bool = False,
    record_s: float = inf,
) -> Candidate | None:
    """``best``, or a faster plan of an answer to the inner problem, under another schedule that the constraints leave
    open. split_alone: of those that split the backward. record_s: slower plans are not looked for."""
    shapes = open_shapes(solver, configuration)
    tried = [
        (solver.balanced_s(shape, inner), number)
        for number, shape in enumerate(shapes)
        if shape.splits_backward or not split_alone
    ]
    for ideal_s, number in sorted(tried):
        limit_s = record_s if best is None else min(record_s, best.predicted.step_time_s)
        if ideal_s >= limit_s:
            break
        name, virtual = shapes[number].schedule, shapes[number].virtual_stages
        # Of a schedule that is pinned all levels are tried.
        pinned = replace(configuration.constraints, schedule=name)
        own = replace(
            configuration, schedule=name, virtual_stages=virtual, passes=None, turns=False, constraints=pinned
        )
        found = solver.filled(own, inner, limit_s)
        if found is not None and (best is None or found.predicted.step_time_s < best.predicted.step_time_s):
            best = found
    return best


def open_shapes(solver: Solver, configuration: Configuration) -> tuple[Pipelining, ...]:
    """The schedules that have a name, other than its own, that the constraints of a configuration leave open."""
    constraints, ranks = configuration.constraints, configuration.num_stages
    if constraints.schedule is not None or ranks == 1:
        return ()
    shapes = constraints.shapes(ranks, configuration.num_microbatches, solver.workload.block_counts)
    return tuple(shape for shape in shapes if shape != configuration.pipelining)
