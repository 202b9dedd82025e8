"""Refinement of a plan whose ops and stages are fixed: offload of each stage, ZeRO stage of each block, prefetch.

None of it changes the assignment of ops, except the first, and all but the first trade memory for time on one rank:

    inputs      divided on every data axis, if the step is then no more than TOLERANCE longer and no slower than a
                baseline: a rank loads its own rows alone. The inner problem may leave the inputs whole, as then no
                count of tokens is summed over ranks
    disk        the fewest blocks of each stage, whose others are in host memory
    offload     a stage that was offloaded with the others stays so only if it does not fit otherwise; stages are
                independent, and offload only costs time, so this is exact
    ZeRO stages every combination over the kinds of block that hold most parameters, the other kinds as the plan has
                them; exact for models of at most MAX_KINDS kinds, under the assignment and stages given
    no ZeRO     taken if that fits, is within TOLERANCE and no slower than a baseline: a simpler program, and any
                optimiser sees whole parameters
    prefetch    the fewest blocks that are as fast as any number up to MAX_PREFETCH

Resharding parameters after forward is never worse than holding them: a block that holds them until its backward could
hold them for the whole step, at stage 2, with the same peak and fewer gathers. So that is left to the user.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

import numpy as np

from autopar.ir.analysis.op_clusters import BATCH
from autopar.ir.offload import Offload
from autopar.search.outer.best_first import TOLERANCE
from autopar.search.outer.configuration import Candidate
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.offloads import least_on_disk
from autopar.search.predict.to_plan import name_axes
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.constraints import role_of_axis
from autopar.search.stages.stage import Stage

# Kinds of blocks, those with most parameters, whose ZeRO stages are tried in all combinations, and the most blocks that
# are prefetched. Chosen. Halved or doubled: same plans, same work (docs/decisions/0021).
MAX_KINDS = 4
MAX_PREFETCH = 3

# Share of a step's time that a refinement has to save. Chosen: below it a plan would be longer to read and no faster.
# Halved or doubled: same plans, same work.
_GAIN = 1e-3


def refine(solver: Solver, found: Candidate, most_s: float = inf) -> Candidate:
    """``found``, or another plan with the same ops, stages and mesh that fits as well.

    That is a faster one, or a simpler one of at most ``most_s`` seconds.
    """
    found = _with_own_rows(solver, found, most_s)
    if not found.configuration.zero or (found.pricing.zero_degree == 1 and not found.configuration.offload):
        return found
    constraints = found.configuration.constraints
    if constraints.zero is None and constraints.may_be_whole():
        whole = _whole(found)
        if _as_good(solver, whole, found, most_s):
            return whole
    if found.configuration.offload is Offload.DISK and constraints.offload is None:
        fits, others = partial(_fits, solver), lambda own, stages: _with(own, own.pricing, stages)
        found = least_on_disk(found, fits, others)
    if found.configuration.offload and constraints.offload is None:
        found = _on_device(solver, found)
    if constraints.zero is None and constraints.reshard_after_forward is None:
        found = _zero_stages(solver, found)
    if constraints.prefetch is None:
        found = _prefetch(solver, found)
    return found


def _with_own_rows(solver: Solver, found: Candidate, most_s: float) -> Candidate:
    pricing, configuration = found.pricing, found.configuration
    group = pricing.workload.clusters.inputs
    if configuration.batch_axes is not None:
        return found
    names = name_axes(pricing.workload, pricing.mesh, found.assignment).names
    divided = tuple(
        BATCH if role_of_axis(name) == "dp" and configuration.constraints.may(old, "dp") else choice
        for name, old, choice in zip(names, pricing.mesh.names, found.assignment[group.index], strict=True)
    )
    picks = np.array([[group.choices.index(choice) for choice in divided]], dtype=np.int64)
    if (
        divided == found.assignment[group.index]
        or not pricing.ops.codes.allows(group, picks, pricing.mesh, pricing.parts).all()
    ):
        return found
    assignment = (*found.assignment[: group.index], divided, *found.assignment[group.index + 1 :])
    other = _with(replace(found, assignment=assignment), pricing, found.stages)
    return other if _as_good(solver, other, found, most_s) else found


def _whole(found: Candidate) -> Candidate:
    configuration = replace(found.configuration, zero=0, data_axes=(), offload=Offload.NONE)
    pricing = replace(found.pricing, zero=0, data_axes=(), offload=Offload.NONE)
    stages = tuple(stage.at(Offload.NONE) for stage in found.stages)
    return _with(replace(found, configuration=configuration), pricing, stages)


def _with(found: Candidate, pricing: Pricing, stages: tuple[Stage, ...]) -> Candidate:
    priced = evaluate_stages(pricing, found.assignment, stages)
    return replace(found, pricing=pricing, priced=priced, stages=stages, pruned=False)


def _as_good(solver: Solver, simpler: Candidate, found: Candidate, most_s: float) -> bool:
    most_s = min(found.predicted.step_time_s * (1 + TOLERANCE), most_s)
    return _fits(solver, simpler) and simpler.predicted.step_time_s <= most_s


def _fits(solver: Solver, found: Candidate) -> bool:
    # The cuts leave as much for rounding.
    return found.predicted.peak_bytes <= solver.budget_bytes * (1 + 1e-9) + 1


def _faster(found: Candidate, than: Candidate) -> bool:
    return found.predicted.step_time_s < than.predicted.step_time_s * (1 - _GAIN)


def _on_device(solver: Solver, found: Candidate) -> Candidate:
    for number, stage in enumerate(found.stages):
        stages = (*found.stages[:number], stage.at(Offload.NONE), *found.stages[number + 1 :])
        other = _with(found, found.pricing, stages)
        if _fits(solver, other):
            found = other
    return found


def _zero_stages(solver: Solver, found: Candidate) -> Candidate:
    workload, zero = found.pricing.workload, found.pricing.zero
    options = [
        zero_stage
        for zero_stage in (1, 2, 3)
        if zero_stage < zero and not (zero_stage == 2 and found.pricing.num_microbatches == 1)
    ]
    if not options:
        return found
    held = [0.0] * len(workload.repetition.kinds)
    for group in workload.parameters:
        for blocks in group.blocks:
            held[workload.repetition.blocks[blocks[0]].kind] += group.numel
    kinds = sorted((kind for kind, numel in enumerate(held) if numel), key=lambda kind: -held[kind])[:MAX_KINDS]

    def at(zero_stages: tuple[int, ...]) -> Candidate:
        chosen = dict(zip(kinds, zero_stages, strict=True))
        own = tuple(chosen.get(kind, zero) for kind in range(len(held)))
        return _with(found, replace(found.pricing, zero_stages=own), found.stages)

    best = found
    if not _faster(at((options[0],) * len(kinds)), found):
        return found  # no combination is faster than the lowest stage everywhere
    for zero_stages in product((*options, zero), repeat=len(kinds)):
        other = at(zero_stages)
        if _faster(other, best) and _fits(solver, other):
            best = other
    return best


def _prefetch(solver: Solver, found: Candidate) -> Candidate:
    best = found
    if 3 in (found.pricing.zero, *(found.pricing.zero_stages or ())):
        for count in range(2, MAX_PREFETCH + 1):
            other = _with(found, replace(found.pricing, prefetch=count), found.stages)
            if _faster(other, best) and _fits(solver, other):
                best = other
    return best
