"""One configuration of the outer search: solve the inner problem, cut stages, predict."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, prod
from typing import NamedTuple

from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.memory.model_state import state_memory
from autopar.cost_model.schedule.pipeline_simulator import time_weights
from autopar.ir.mesh import Mesh
from autopar.ir.rematerialisation import LEVELS
from autopar.ir.rule import Assignment
from autopar.ir.schedule import STEADY_ROUNDS, Pipelining
from autopar.search.assign.solve import solve
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.prices import Prices
from autopar.search.outer.speculation import Ahead, Job
from autopar.search.pricing.block_prices import Priced, evaluate
from autopar.search.pricing.build_instance import Weights, build
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.allowed_choices import Allowed, AnyOf, Rules
from autopar.search.problem.constraints import Constraints, role_of_axis
from autopar.search.problem.workload import Workload
from autopar.search.stages.stage_cuts import Cuts, cut_pipeline

# A plan whose estimate is this many times as long as the record is not simulated. Chosen. With half or twice its
# distance from 1: same plans, work −3 to +8 % (docs/decisions/0021, as for the others below).
_PRUNE_ABOVE = 1.1

# Least that a simulated step took of its closed form: of 40 plans of Llama 3 70B in four stages with 1 to 20 virtual
# stages 0.98, 0.99 of most; measured. At 0.98: the same plans, half as much work again.
_CLOSED_FORM = 0.99

# How often the stages of a configuration are cut; the share of a rank's memory that a plan fills at least to be taken
# without another cut; the share that another cut aims at; and the most by which it raises the budget at once. Chosen.
# Twice as many cuts: same plans, work +7 %; two: a step of Mixtral 0.11 % longer. With half or twice its distance from
# 1, each of the two shares: same plans, work within 2 %. Half as much room to try: steps 0.10 and 0.11 % longer; twice:
# same plans.
_CUTS = 3
_FILLED = 0.985
_REFILLED = 0.997
_ROOM_TO_TRY = 1.1

# Work: a column of an integer program counts as 1; each variable and factor of an inner problem, and each cut and
# simulation of stages, as so many. Chosen so that equal work takes about equal time: 8 µs of CPU time a piece for
# Llama 3 8B on 64, 15 µs for Mixtral 8x7B on 32 devices. Halved or doubled: same plans, CPU time of the search −4 to
# +21 %.
_TERM_WORK = 12
_CUT_WORK = 1500


class Solved(NamedTuple):
    """An answer as processes exchange it.

    work: see ``Solver``. priced: block by block, where the search will ask for that.
    """

    assignment: tuple[Assignment, ...]
    objective: float
    work: int
    priced: Priced | None


def job(variants: Sequence[Configuration], weights: Weights, record_s: float = float("inf")) -> Job:
    """The inner problem of a configuration, or of several at once (see ``build_instance``) that differ only in ZeRO.

    The key holds everything that the answer depends on. record_s: seconds of a step of the best plan so far.
    """
    # The split into stages and the schedule matter to the cuts only, apart from what they share with others.
    first = variants[0]
    key = (
        first.mesh,
        first.num_stages > 1,
        first.num_microbatches,
        *((one.zero, one.data_axes, one.batch_axes, one.offload) for one in variants),
        first.constraints,
        weights,
    )
    return key, (variants, weights, record_s)


def _passes(shape: Pipelining) -> float:
    """Step time in passes of one microbatch through all stages, if the stages are equal."""
    of_sum, of_max = time_weights(shape)
    return of_sum + of_max / shape.num_stages


@dataclass(slots=True)
class Solver:
    """Answers for configurations of one workload on one cluster, each computed once.

    batches: of a step, that the captured batch makes. saved_bytes: most that a rank saves for backward. work: a measure
    of time that is the same on every machine.
    """

    prices: Prices
    budget_bytes: float
    levels: tuple[str, ...] = LEVELS
    saved_bytes: float = inf
    batches: int = 1
    num_solved: int = 0
    work: int = 0
    ahead: Ahead = field(init=False)
    _rules: dict[tuple[object, ...], Allowed] = field(default_factory=dict)
    _inner: dict[Hashable, Inner] = field(default_factory=dict)
    _room: dict[tuple[object, ...], tuple[int, float]] = field(default_factory=dict)
    _relative: dict[tuple[tuple[int, ...], int], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ahead = Ahead(self._solve, self._solve_ahead)

    @property
    def workload(self) -> Workload:
        """The workload that is planned for."""
        return self.prices.workload

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for."""
        return self.prices.cluster

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.workload.captured.batch_size // self.batches

    @property
    def num_tokens(self) -> float:
        """Tokens of a step."""
        return self.workload.num_tokens / self.batches

    @property
    def least_state_bytes(self) -> float:
        """State of the model perfectly divided over all ranks."""
        share = self.workload.trainable_numel / self.cluster.num_gpus
        return state_memory(share, zero=0, data_size=1, precision="fp32").total

    def least_state_of(self, configuration: Configuration) -> float:
        """Bytes of state that the fullest rank holds at least: equal stages, divided by all but data axes.

        Experts may be divided on any axis but one for data alone, also where ZeRO divides the rest.
        """
        mesh, data = configuration.mesh, set(configuration.data_axes)
        roles = [role_of_axis(name) for name in mesh.names]
        rows = {axis for axis, role in enumerate(roles) if role == "dp"}
        whole = data | {axis for axis, role in enumerate(roles) if role in ("dp", "ep")}
        experts = self.workload.expert_numel
        dense = self.workload.trainable_numel - experts
        memory = self.cluster.device.stack.memory

        def held(numel: int, undivided: set[int]) -> float:
            degree = prod(size for axis, size in enumerate(mesh.sizes) if axis not in undivided)
            return state_memory(
                numel / (configuration.num_stages * degree),
                zero=configuration.zero,
                data_size=prod(mesh.sizes[axis] for axis in data & undivided),
                precision=self.workload.precision if memory.lasting_gradients else "fp32",
                stack=memory,
                num_microbatches=configuration.num_microbatches,
                offload=self.cluster.device.is_left_by(configuration.offload),
            ).total

        return held(dense, whole) + held(experts, rows)

    def pricing(self, configuration: Configuration) -> Pricing:
        """Prices of a configuration on its mesh."""
        return Pricing(
            ops=self.prices.ops,
            moves=self.prices.on(configuration.mesh),
            named_mesh=configuration.mesh,
            batches=self.batches,
            num_microbatches=configuration.num_microbatches,
            zero=configuration.zero,
            data_axes=configuration.data_axes,
            prefetch=configuration.constraints.prefetch or 1,
            reshard=configuration.constraints.reshard_after_forward is not False,
            offload=configuration.offload,
        )

    def inner(self, configuration: Configuration, weights: Weights) -> Inner:
        """The answer to the inner problem of ``configuration``. Raises NoOption if a cluster has no choice left."""
        key, arguments = job((configuration,), weights)
        found = self._inner.get(key)
        if found is None:
            self.num_solved += 1
            solved: Solved = self.ahead.answer(key, arguments)
            self.work += solved.work
            found = self._inner[key] = Inner(
                pricing=self.pricing(configuration),
                assignment=solved.assignment,
                objective=solved.objective,
                shared_once=configuration.num_stages == 1,
                given=solved.priced,
            )
        return found

    def least(self, variants: Sequence[Configuration]) -> float:
        """Least objective of the inner problems of all of ``variants``, with memory free of charge, in seconds of a
        step."""
        key, arguments = job(variants, Weights(sync=0.0))
        self.num_solved += 1
        solved: Solved = self.ahead.answer(key, arguments)
        self.work += solved.work
        return solved.objective

    def _solve(self, variants: Sequence[Configuration], weights: Weights, record_s: float) -> Solved:
        built = build([self.pricing(one) for one in variants], self.rules(variants), weights)
        solution = solve(built.instance)
        assignment = built.assignments(solution.labelling)
        terms = len(built.instance.costs) + len(built.instance.factors)
        return Solved(assignment, solution.objective, _TERM_WORK * terms + solution.num_columns, None)

    def _solve_ahead(self, variants: Sequence[Configuration], weights: Weights, record_s: float) -> Solved:
        """``_solve``, priced where the search is likely to ask for that: with memory weighted most answers are bounds
        alone."""
        solved = self._solve(variants, weights, record_s)
        if len(variants) > 1 or weights.state or self.least_s(variants[0], solved.objective) >= record_s:
            return solved
        (own,) = variants
        priced = evaluate(self.pricing(own), solved.assignment, shared_once=own.num_stages == 1)
        return solved._replace(priced=priced)

    def rules(self, variants: Sequence[Configuration]) -> Allowed:
        """The choices allowed to op clusters in any of several configurations that differ only in ZeRO."""
        first = variants[0]
        kinds = tuple(dict.fromkeys((one.data_axes if one.zero else (), one.batch_axes) for one in variants))
        key = (first.mesh, first.constraints, *kinds)
        if key not in self._rules:
            rules = [
                Rules(
                    choices=self.prices.choices,
                    mesh=first.mesh,
                    constraints=first.constraints,
                    data_axes=data_axes,
                    batch_axes=batch_axes,
                    batch_size=self.batch_size,
                )
                for data_axes, batch_axes in kinds
            ]
            self._rules[key] = rules[0] if len(rules) == 1 else AnyOf(tuple(rules))
        return self._rules[key]

    def complete(
        self,
        configuration: Configuration,
        inner: Inner,
        record_s: float = float("inf"),
        *,
        relaxed: bool = False,
        try_first: tuple[str, int] | None = None,
    ) -> Candidate | None:
        """Cut the stages for an answer to the inner problem and predict, under the best schedule; None if nothing fits.

        The stages of a schedule are cut if its time with the most even stages is less than the best found and than
        ``record_s`` seconds, and its step is simulated if the closed form of those is; of one schedule it always is.
        relaxed: the first that fits is taken. try_first: a schedule and its virtual stages, tried before others.
        """
        best: Candidate | None = None
        num_cuts = 2 if relaxed else _CUTS
        # Seconds of a step, place among the schedules, the configuration under one, its first cuts if they were made.
        open_: list[tuple[float, int, Configuration, Candidate | None]] = [
            (
                -inf if (shape.schedule, shape.virtual_stages) == try_first else self.balanced_s(shape, inner),
                place,
                replace(configuration, schedule=shape.schedule, virtual_stages=shape.virtual_stages),
                None,
            )
            for place, shape in enumerate(self.shapes(configuration))
        ]
        heapq.heapify(open_)
        tried = False
        while open_:
            seconds, place, own, first = heapq.heappop(open_)
            likely = seconds * (_CLOSED_FORM if first is not None else 1.0)
            if (tried and likely >= record_s) or (best is not None and (relaxed or likely >= best.step_time_s)):
                break
            if first is None:
                first = self._cut(own, inner, self.budget_bytes, record_s)
                if first is not None and first.estimate_s > seconds > -inf:
                    heapq.heappush(open_, (first.estimate_s, place, own, first))
                    continue
            tried = True
            found = self._complete(own, inner, record_s, num_cuts, first)
            if found is not None and (best is None or found.step_time_s < best.step_time_s):
                best = found
        return best

    def likely_s(self, configuration: Configuration, inner: Inner, record_s: float = float("inf")) -> float:
        """Estimated seconds of a step under the best schedule, with the most even stages and unlimited memory.

        Returns ``least_s`` where the objective alone shows that the estimate is no less than ``record_s``.
        """
        least = self.least_s(configuration, inner.objective)
        if least >= record_s:
            return least
        return min((self.balanced_s(shape, inner) for shape in self.shapes(configuration)), default=0.0)

    def least_s(self, configuration: Configuration, objective: float) -> float:
        """``likely_s`` at least: from the objective of the inner problem, which counts gradient reductions least."""
        microbatch_s = objective / configuration.num_microbatches
        return min((microbatch_s * _passes(shape) for shape in self.shapes(configuration)), default=0.0)

    def balanced_s(self, shape: Pipelining, inner: Inner) -> float:
        """Estimated seconds of a step with the most even stages and unlimited memory."""
        return inner.least_times(shape.num_ranks).step_s(shape, self._links(shape, inner.pricing.mesh))

    def _links(self, shape: Pipelining, mesh: Mesh) -> tuple[float, ...]:
        """See ``stage_cuts.step_estimate``."""
        ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
        key = (tuple(ranks), mesh.size)
        if key not in self._relative:
            slowest = self.cluster.stage_link(mesh, shape.num_ranks).ring_bandwidth(2)
            self._relative[key] = tuple(
                0.0 if a == b else min(1.0, slowest / self.cluster.send_link(mesh, a, b).ring_bandwidth(2))
                for a, b in pairwise(ranks)
            )
        return self._relative[key]

    def shapes(self, configuration: Configuration) -> tuple[Pipelining, ...]:
        """The schedules that a configuration leaves open. Where any will do, those that split the backward are not
        tried with ZeRO-3, which gathers parameters for each pass."""
        every = configuration.constraints.shapes(
            configuration.num_stages, configuration.num_microbatches, self.workload.block_counts
        )
        plain = configuration.constraints.schedule is None and configuration.zero == 3
        return tuple(shape for shape in every if not (plain and shape.splits_backward))

    def filled(self, configuration: Configuration, inner: Inner, record_s: float = inf) -> Candidate | None:
        """The plan of a configuration under its own schedule, whose stages fill the memory that there is; None if
        nothing fits, or its closed form is above ``record_s``. Of an order that was found the form is a rough one."""
        first = self._cut(configuration, inner, self.budget_bytes, record_s)
        if first is not None and configuration.passes is None and first.estimate_s * _CLOSED_FORM >= record_s:
            return None
        found = self._complete(configuration, inner, record_s, _CUTS, first)
        if found is None or found.pruned:
            return None
        return found if found.predicted.peak_bytes <= self.budget_bytes * (1 + 1e-9) + 1 else None

    def _complete(
        self, configuration: Configuration, inner: Inner, record_s: float, num_cuts: int, first: Candidate | None
    ) -> Candidate | None:
        """``complete`` under the schedule of ``configuration``. first: the plan with the stages cut for all memory.

        Cuts count the memory of a stage in one sum, the prediction as a profile over the step. So where a plan leaves
        room, or takes too much, stages are cut anew with as much more or less to fill.
        """
        room, best, last = self.budget_bytes, None, first
        for number in range(num_cuts):
            candidate = self._cut(configuration, inner, room, record_s) if number else first
            if candidate is not None and last is not None and candidate.stages == last.stages:
                candidate = last  # its prediction is known
            if candidate is None:
                if best is not None or room > self.budget_bytes:
                    break
                room *= _ROOM_TO_TRY
                continue
            if candidate.pruned:
                return best or candidate
            last, filled = candidate, candidate.predicted.peak_bytes / self.budget_bytes
            if filled <= 1:
                faster = best is None or candidate.step_time_s < best.step_time_s
                best = candidate if faster else best
                if not faster or filled >= _FILLED or not candidate.is_rematerialised:
                    break
            room *= min(_ROOM_TO_TRY, _REFILLED / filled)
        return best

    def _cut(self, configuration: Configuration, inner: Inner, room: float, record_s: float) -> Candidate | None:
        """A plan whose stages take ``room`` bytes at most, as ``cut`` counts them."""
        found = self.cuts(configuration, inner, room)
        self.work += _CUT_WORK if found is not None else _CUT_WORK // 3
        if found is None:
            return None
        stages = found.stages
        if configuration.offload:
            stages = tuple(stage.at(configuration.offload) for stage in stages)
        return Candidate(
            configuration=configuration,
            pricing=inner.pricing,
            assignment=inner.assignment,
            priced=inner.priced,
            stages=stages,
            estimate_s=found.time_s,
            pruned=found.time_s > record_s * _PRUNE_ABOVE,
        )

    def cuts(self, configuration: Configuration, inner: Inner, budget_bytes: float) -> Cuts | None:
        """The best stage cuts under a memory budget; None if nothing fits.

        Where any schedule will do, those that split the backward are tried without rematerialisation: an order with
        it is found for the plan at last (``found_order``).
        """
        shape, costs = configuration.pipelining, inner.costs(configuration.num_stages)
        later = shape.splits_backward and shape.passes is None and configuration.constraints.schedule is None
        levels = ("none",) if later and "none" in self.levels else self.levels
        links = self._links(shape, configuration.mesh)
        return cut_pipeline(costs, shape, budget_bytes, levels, links, self.saved_bytes)

    def microbatches_to_fit(self, configuration: Configuration) -> tuple[float, ...]:
        """Number of microbatches at which the activations saved by one stage fit, for every rematerialisation level."""
        costs = self.inner(configuration, Weights(sync=0.0)).costs(1)
        room = self.budget_bytes - sum(block.static_bytes for block in costs)
        if room <= 0:
            return ()
        levels = [level for level, name in enumerate(LEVELS) if name in self.levels]
        kept = [sum(block.saved_bytes[level] for block in costs) for level in levels]
        return tuple(configuration.num_microbatches * num_bytes / room for num_bytes in kept)

    def memory_weights(self, configuration: Configuration, price: float) -> Weights:
        """Weights with a Lagrange multiplier on memory, in seconds a byte: of state, and of as many microbatches as a
        rank saves."""
        live, _ = self.room(configuration.num_stages, configuration.num_microbatches, configuration.constraints)
        kept = live if "none" in self.levels else 0
        rematerialise = len(self.levels) > 1
        return Weights(sync=0.0, state=price, activations=price * kept, working=price, rematerialise=rematerialise)

    def room(self, num_stages: int, num_microbatches: int, constraints: Constraints) -> tuple[int, float]:
        """The most microbatches that a rank saves under the plainest schedule, and the bytes that one place in every
        stage has for the state and so many microbatches of the model, under any schedule but the naive one.

        Rank i has S_i bytes of state, saves at least k_i microbatches of A_i bytes, and has B; with k the most of one
        rank,

            sum over ranks of  max(1, k / k_i) (S_i + k_i A_i)  <=  B sum of max(1, k / k_i)

        whose left side is S + k A of the model at least.
        """
        # From a few microbatches on, more of them change nothing; but GPipe keeps all.
        steady = min(num_microbatches, STEADY_ROUNDS * num_stages)
        count = num_microbatches if constraints.schedule == "gpipe" else steady
        key = (num_stages, count, constraints)
        if key not in self._room:
            shapes = constraints.shapes(num_stages, count, self.workload.block_counts)
            most = max(shapes[0].live()) if shapes else 1
            found = 0.0
            for shape in shapes:
                if shape.schedule != "naive":
                    kept = [inf] * num_stages
                    for stage, live in enumerate(shape.live()):
                        kept[shape.rank_of(stage)] = min(live, kept[shape.rank_of(stage)])
                    found = max(found, sum(max(1.0, most * shape.virtual_stages / number) for number in kept))
            self._room[key] = most, self.budget_bytes * (found or num_stages * most)
        return self._room[key]
