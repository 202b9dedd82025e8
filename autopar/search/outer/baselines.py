"""Good plans to begin with: the relaxed solve of every baseline, full solves of the best few, then their neighbours.

A baseline has its axes' roles given, so one inner problem estimates its step, and gives its plan where that fits with
memory free of charge (*relaxed*). Which ZeRO stage comes first matters, as stage 3 gathers parameters in every
microbatch: a baseline begins with the lowest that leaves room for activations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from math import inf
from typing import Protocol

from autopar.ir.mesh import Mesh
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver, job
from autopar.search.outer.lower_bounds import Bounds
from autopar.search.outer.outcome import Outcome
from autopar.search.outer.space import Space
from autopar.search.outer.speculation import Job
from autopar.search.pricing.build_instance import Weights
from autopar.search.problem.constraints import NoOption, role_of_axis

# All are chosen; docs/decisions/0021 has the effect of half and twice of each on two models.

# Share of the work of a search that relaxed solves of baselines may take, and all seeds together. Halved or doubled:
# same plans, same work, as neither was reached.
RELAXED_SHARE = 0.5
SEED_SHARE = 0.7

# Share of a rank's memory that the state of the model may take where a lower ZeRO stage is preferred. Halved: same
# plans, work +54 % and −14 %; doubled: +80 % and −11 %.
STATE_SHARE = 0.7

# Estimated least ratio of a baseline's step time to the time inferred from a baseline with as many stages and other
# data axes; and from one with another number of microbatches too. With half or twice the distance from 1: same plans,
# work within 2 %.
ALIKE_BUT_DATA = 0.99
ALIKE = 0.96

# Baselines that are solved in full: the best that fit relaxed, whose neighbours are tried too, and some others.
# BEST halved: same plans, work −4 % and 0 %; doubled: +71 % and 0 %. EARNEST: same plans, work within 2 %.
BEST = 4
EARNEST = 8


class Trials(Protocol):
    """The search that tries the baselines; see ``best_first.Outer``."""

    num_skipped: int
    max_work: int

    @property
    def solver(self) -> Solver:
        """Solver of the inner problems."""

    @property
    def space(self) -> Space:
        """The configurations that the constraints leave open."""

    @property
    def bounds(self) -> Bounds:
        """Lower bounds on configurations."""

    @property
    def best(self) -> Candidate | None:
        """The best plan so far."""

    @property
    def record_s(self) -> float:
        """Seconds of a step of the best plan so far; inf without one."""

    def known_of(self, configuration: Configuration) -> Outcome | None:
        """Outcome of a configuration that is pruned without solving it; None if it is not."""

    def try_baseline(self, configuration: Configuration, *, relaxed: bool = False) -> Outcome:
        """Try a configuration. relaxed: with memory free of charge."""

    def consider(
        self,
        configuration: Configuration,
        inner: Inner,
        *,
        relaxed: bool = False,
        try_first: tuple[str, int] | None = None,
    ) -> Candidate | None:
        """The plan of an answer to the inner problem, recorded if it is the best so far; None if nothing fits.

        relaxed: under the first schedule that it fits with. try_first: a schedule and its virtual stages, tried before
        others.
        """

    def note(self, configuration: Configuration, outcome: Outcome) -> None:
        """Record the outcome of a baseline."""

    def refuse(self, error: NoOption) -> None:
        """Count a configuration in which an op has no choice left."""


@dataclass(slots=True)
class Seeds:
    """The baselines of one search. outcomes: of every configuration that was tried."""

    outer: Trials
    outcomes: dict[Configuration, Outcome] = field(default_factory=dict)
    _slower: dict[Hashable, float] = field(default_factory=dict)

    def run(self) -> None:
        """Try the baselines, then the neighbours of the best until none of them is new."""
        first = list(self.in_turns())
        self.solve_relaxed(first)
        if self.outer.best is None:
            # Only size matters: those with the least memory, one pipeline degree after the other.
            for configuration in self.in_turns(leanest=True):
                self.attempt(configuration, SEED_SHARE)
        for configuration in list(self.smaller()):
            self.attempt(configuration, SEED_SHARE, relaxed=True)
        # Those that fit relaxed, and those that may fit with fewer saved activations.
        for configuration in (*self.best(BEST, fitting=True), *self.best(EARNEST, fitting=False)):
            self.attempt(configuration, SEED_SHARE, retry=True)
        climbed = set[Configuration]()
        while few := [one for one in self.best(BEST, fitting=True) if one not in climbed]:
            climbed.update(few)
            for configuration in self.near(few):
                self.attempt(configuration, SEED_SHARE)

    def in_turns(self, *, leanest: bool = False) -> Iterator[Configuration]:
        """Baselines in order. Pipeline degrees take turns, and among those with one degree the meshes, each with its
        most promising number of microbatches next. leanest: at the ZeRO stage with the least memory."""
        space, bounds = self.outer.space, self.outer.bounds
        found: dict[int, dict[Mesh, list[Configuration]]] = {}
        plain: list[Configuration] = []
        for root in sorted(space.baselines(), key=lambda c: bounds.estimate_s(c.num_stages, c.num_microbatches)):
            zero_stages = space.with_zero(root)
            own = found.setdefault(root.num_stages, {}).setdefault(root.mesh, [])
            own += zero_stages[-1:] if leanest else self.roomy(zero_stages)
            plain += [] if leanest else space.plain(root)
        degrees = ([*_turns(meshes.values())] for meshes in found.values())
        yield from _turns(degrees)
        yield from plain

    def roomy(self, zero_stages: list[Configuration]) -> list[Configuration]:
        """The lowest ZeRO stage that leaves room for activations, or the highest."""
        solver = self.outer.solver
        most = STATE_SHARE * solver.budget_bytes
        return next(([one] for one in zero_stages if solver.least_state_of(one) <= most), zero_stages[-1:])

    def solve_relaxed(self, configurations: list[Configuration]) -> None:
        """Solve each configuration with memory free of charge, unless similar baselines prune it."""
        outer = self.outer

        def coming() -> Iterator[Job]:
            left = (c for c in configurations if c not in self.outcomes and outer.known_of(c) is None)
            return (job((c,), Weights(sync=0.0), outer.record_s) for c in left if self.by_others(c) is None)

        with outer.solver.ahead.expecting(coming):
            for configuration in configurations:
                known = self.by_others(configuration)
                if known is None:
                    self.attempt(configuration, RELAXED_SHARE, relaxed=True)
                    self.learn(configuration)
                else:
                    outer.num_skipped += 1
                    self.outcomes[configuration] = known
                    outer.note(configuration, known)

    def by_others(self, configuration: Configuration) -> Outcome | None:
        """Estimated outcome of a configuration from similar baselines, if that is slower than the best plan so far;
        else None."""
        estimate_s = self.outer.bounds.estimate_s(configuration.num_stages, configuration.num_microbatches)
        for alike, share in zip(_alike(configuration), (ALIKE_BUT_DATA, ALIKE), strict=True):
            seconds = estimate_s * self._slower.get(alike, 0.0)
            if configuration.zero <= 1 and share * seconds >= self.outer.record_s:
                return Outcome(None, seconds)
        return None

    def learn(self, configuration: Configuration) -> None:
        """Record the smallest observed ratio of step time to estimate among similar baselines, without gradient
        reductions, which data axes decide.

        The time of tensor parallelism hardly depends on microbatches. The gathers of ZeRO in every one of them do.
        """
        outer, outcome = self.outer, self.outcomes.get(configuration)
        tried = outcome is not None and outcome.least_s < inf and outer.known_of(configuration) is None
        if not tried or configuration.zero > 1:
            return
        inner = outer.solver.inner(configuration, Weights(sync=0.0))
        sums_s = sum(block.sync.lost.step_s for block in inner.priced.blocks)
        seconds = outer.solver.least_s(configuration, inner.objective - sums_s)
        slower = seconds / outer.bounds.estimate_s(configuration.num_stages, configuration.num_microbatches)
        for alike in _alike(configuration):
            self._slower[alike] = min(slower, self._slower.get(alike, inf))

    def attempt(
        self, configuration: Configuration, share: float, *, relaxed: bool = False, retry: bool = False
    ) -> None:
        """Try a configuration, unless the work for it is spent or its bounds prune it.

        relaxed: with memory free of charge. retry: although its relaxed problem was solved before.
        """
        outer = self.outer
        spent = outer.solver.work >= outer.max_work * share and outer.best is not None
        if spent or (configuration in self.outcomes and not retry):
            return
        outcome = self.outcomes[configuration] = outer.try_baseline(configuration, relaxed=relaxed)
        outer.note(configuration, outcome)

    def best(self, number: int, *, fitting: bool) -> list[Configuration]:
        """The ``number`` most promising configurations that were tried. fitting: of those with a plan, or of those
        without."""
        found = [
            (outcome.least_s, place, configuration)
            for place, (configuration, outcome) in enumerate(self.outcomes.items())
            if outcome.least_s < inf and (outcome.step_time_s is not None) is fitting
        ]
        return [configuration for _, _, configuration in sorted(found, key=lambda one: one[:2])[:number]]

    def smaller(self) -> Iterator[Configuration]:
        """Baselines without a pipeline that did not fit, with as many microbatches that they may fit at some level of
        rematerialisation."""
        outer, seen = self.outer, set[Mesh]()
        for tried, outcome in list(self.outcomes.items()):
            # Infinity is what nothing fits in, such as too few microbatches.
            crowded = outcome.step_time_s is None and (outcome.least_s < outer.record_s or outcome.least_s == inf)
            if tried.num_stages > 1 or not crowded or tried.mesh in seen:
                continue
            if outer.solver.least_state_of(tried) > outer.solver.budget_bytes:
                continue
            seen.add(tried.mesh)
            options = outer.space.microbatches(tried.mesh, tried.constraints)
            try:
                enough = outer.solver.microbatches_to_fit(tried)
            except NoOption as error:
                outer.refuse(error)
                continue
            for needed in enough:
                # Some memory is needed beside what is kept.
                for num in [num for num in options if num >= needed][:2]:
                    for root in outer.space.roots(1, tried.mesh, num, tried.constraints):
                        yield from self.roomy(outer.space.with_zero(root))

    def near(self, few: list[Configuration]) -> Iterator[Configuration]:
        """The same configurations at other ZeRO stages, all of them first; then with fewer or more microbatches; then
        with ranks in other roles."""
        space = self.outer.space
        for reach, best in product((0, 1), few):
            options = space.microbatches(best.mesh, best.constraints)
            place = options.index(best.num_microbatches)
            for num in options[max(0, place - reach) : place + reach + 1]:
                for root in space.roots(best.num_stages, best.mesh, num, best.constraints):
                    yield from space.with_zero(root)
        for best in few:
            for root in space.regrouped(best):
                yield from self.roomy(space.with_zero(root))


def _alike(configuration: Configuration) -> tuple[Hashable, Hashable]:
    """Keys of the baselines similar to one: those that differ in data axes only, and those that differ in microbatches
    too."""
    axes = tuple(axis for axis in configuration.mesh.axes if role_of_axis(axis.name) != "dp")
    own = (configuration.num_stages, axes)
    return (*own, configuration.num_microbatches), own


def _turns(rows: Iterable[Sequence[Configuration]]) -> Iterator[Configuration]:
    """The first of every row, the second of every row, and so on."""
    for turn in zip_longest(*rows):
        yield from (configuration for configuration in turn if configuration is not None)
