"""Good plans to begin with: every baseline at a glance, the best few in earnest, then what is near those.

A baseline has its axes' roles given, so one inner problem says what it is likely to take, and what it takes where it
fits with memory for free. Which level of ZeRO comes first matters, as level 3 gathers parameters in every microbatch: a
baseline begins with the lowest that leaves room for activations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from math import inf
from typing import Protocol

from autopar.ir.mesh import Mesh
from autopar.search.outer.configuration import Candidate, Configuration
from autopar.search.outer.configuration_solver import HIDDEN, Solver, job
from autopar.search.outer.lower_bounds import Bounds
from autopar.search.outer.outcome import Outcome
from autopar.search.outer.space import Space
from autopar.search.outer.speculation import Job
from autopar.search.pricing.build_instance import Weights
from autopar.search.problem.constraints import NoOption, role_of_axis

# Chosen, all of them; what half and twice of each does on two models is in docs/decisions/0021.

# Part of the work of a search that baselines may take at a glance, and all seeds together. Halved or doubled: same
# plans, same work, as neither was reached.
GLANCE_SHARE = 0.5
SEED_SHARE = 0.7

# Part of a rank's memory that the state of the model may take where a lower level of ZeRO is preferred. Halved: same
# plans, work +54 % and −14 %; doubled: +80 % and −11 %.
STATE_SHARE = 0.7

# Of the seconds that a baseline is taken for, by what another one with as many stages and other data axes takes, the
# share that it takes at least; and where the number of microbatches is another one too. With half or twice the distance
# from 1: same plans, work within 2 %.
ALIKE_BUT_DATA = 0.99
ALIKE = 0.96

# Baselines that are tried in earnest: the best that fit as they are, whose neighbours are tried too, and some others.
# BEST halved: same plans, work −4 % and 0 %; doubled: +71 % and 0 %. EARNEST: same plans, work within 2 %.
BEST = 4
EARNEST = 8


class Trials(Protocol):
    """The search that baselines are tried by; see ``best_first.Outer``."""

    num_skipped: int
    max_work: int

    @property
    def solver(self) -> Solver: ...
    @property
    def space(self) -> Space: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def best(self) -> Candidate | None: ...
    @property
    def record_s(self) -> float: ...
    def known_of(self, configuration: Configuration) -> Outcome | None: ...
    def try_baseline(self, configuration: Configuration, *, once: bool = False) -> Outcome: ...
    def note(self, configuration: Configuration, outcome: Outcome) -> None: ...
    def refuse(self, error: NoOption) -> None: ...


@dataclass(slots=True)
class Seeds:
    """outcomes: of all that was tried."""

    outer: Trials
    outcomes: dict[Configuration, Outcome] = field(default_factory=dict)
    _slower: dict[Hashable, float] = field(default_factory=dict)

    def run(self) -> None:
        first = list(self.in_turns())
        self.glance_at(first)
        if self.outer.best is None:
            # Only size matters: those with the least memory, one pipeline degree after the other.
            for configuration in self.in_turns(leanest=True):
                self.attempt(configuration, SEED_SHARE)
        for configuration in list(self.smaller()):
            self.attempt(configuration, SEED_SHARE, once=True)
        # Those that fit as they are, and those that may with less to keep.
        for configuration in (*self.best(BEST, fitting=True), *self.best(EARNEST, fitting=False)):
            self.attempt(configuration, SEED_SHARE, again=True)
        climbed = set[Configuration]()
        while few := [one for one in self.best(BEST, fitting=True) if one not in climbed]:
            climbed.update(few)
            for configuration in self.near(few):
                self.attempt(configuration, SEED_SHARE)

    def in_turns(self, *, leanest: bool = False) -> Iterator[Configuration]:
        """Baselines. Pipeline degrees take turns, and among those with one degree the meshes, each with its most
        promising number of microbatches next. leanest: at the level of ZeRO with the least memory."""
        space, bounds = self.outer.space, self.outer.bounds
        found: dict[int, dict[Mesh, list[Configuration]]] = {}
        plain: list[Configuration] = []
        for root in sorted(space.baselines(), key=lambda c: bounds.hope(c.num_stages, c.num_microbatches)):
            levels = space.with_zero(root)
            own = found.setdefault(root.num_stages, {}).setdefault(root.mesh, [])
            own += levels[-1:] if leanest else self.roomy(levels)
            plain += [] if leanest else space.plain(root)
        degrees = ([*_turns(meshes.values())] for meshes in found.values())
        yield from _turns(degrees)
        yield from plain

    def roomy(self, levels: list[Configuration]) -> list[Configuration]:
        """The lowest level of ZeRO that leaves room for activations, or the highest."""
        solver = self.outer.solver
        most = STATE_SHARE * solver.budget_bytes
        return next(([one] for one in levels if solver.least_state_of(one) <= most), levels[-1:])

    def glance_at(self, configurations: list[Configuration]) -> None:
        outer = self.outer

        def coming() -> Iterator[Job]:
            left = (c for c in configurations if c not in self.outcomes and outer.known_of(c) is None)
            return (job((c,), Weights(sync=HIDDEN), outer.record_s) for c in left if self.by_others(c) is None)

        with outer.solver.ahead.expecting(coming):
            for configuration in configurations:
                known = self.by_others(configuration)
                if known is None:
                    self.attempt(configuration, GLANCE_SHARE, once=True)
                    self.learn(configuration)
                else:
                    outer.num_skipped += 1
                    self.outcomes[configuration] = known
                    outer.note(configuration, known)

    def by_others(self, configuration: Configuration) -> Outcome | None:
        """What baselines that are like it say of one, if that is slower than the best plan so far."""
        hope = self.outer.bounds.hope(configuration.num_stages, configuration.num_microbatches)
        for alike, share in zip(_alike(configuration), (ALIKE_BUT_DATA, ALIKE), strict=True):
            seconds = hope * self._slower.get(alike, 0.0)
            if configuration.zero <= 1 and share * seconds >= self.outer.record_s:
                return Outcome(None, seconds)
        return None

    def learn(self, configuration: Configuration) -> None:
        """How far a baseline is from the bound of its pace, without the sums of gradients, which data axes decide.

        What tensor parallelism takes hardly depends on microbatches. What ZeRO gathers in every one of them does.
        """
        outer, outcome = self.outer, self.outcomes.get(configuration)
        tried = outcome is not None and outcome.least_s < inf and outer.known_of(configuration) is None
        if not tried or configuration.zero > 1:
            return
        inner = outer.solver.inner(configuration, Weights(sync=HIDDEN))
        sums_s = HIDDEN * sum(block.sync.step_s for block in inner.priced.blocks)
        seconds = outer.solver.least_s(configuration, inner.objective - sums_s)
        slower = seconds / outer.bounds.hope(configuration.num_stages, configuration.num_microbatches)
        for alike in _alike(configuration):
            self._slower[alike] = min(slower, self._slower.get(alike, inf))

    def attempt(self, configuration: Configuration, share: float, *, once: bool = False, again: bool = False) -> None:
        """Try a leaf, unless the work for it is spent or it is known not to be worth while. once: with memory for free.

        again: though it was glanced at.
        """
        outer = self.outer
        spent = outer.solver.work >= outer.max_work * share and outer.best is not None
        if spent or (configuration in self.outcomes and not again):
            return
        outcome = self.outcomes[configuration] = outer.try_baseline(configuration, once=once)
        outer.note(configuration, outcome)

    def best(self, number: int, *, fitting: bool) -> list[Configuration]:
        """The most promising of those that were tried. fitting: of those with a plan, or of those without."""
        found = [
            (outcome.least_s, place, configuration)
            for place, (configuration, outcome) in enumerate(self.outcomes.items())
            if outcome.least_s < inf and (outcome.step_time_s is not None) is fitting
        ]
        return [configuration for _, _, configuration in sorted(found, key=lambda one: one[:2])[:number]]

    def smaller(self) -> Iterator[Configuration]:
        """Of baselines without a pipeline that did not fit, those with as many microbatches that they may, at some
        level of rematerialisation."""
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
        """The same at other levels of ZeRO, all of them first; then with fewer or more microbatches."""
        space = self.outer.space
        for reach, best in product((0, 1), few):
            options = space.microbatches(best.mesh, best.constraints)
            place = options.index(best.num_microbatches)
            for num in options[max(0, place - reach) : place + reach + 1]:
                for root in space.roots(best.num_stages, best.mesh, num, best.constraints):
                    yield from space.with_zero(root)


def _alike(configuration: Configuration) -> tuple[Hashable, Hashable]:
    """What a baseline has in common with one that has other data axes, and with one that has other microbatches too."""
    axes = tuple(axis for axis in configuration.mesh.axes if role_of_axis(axis.name) != "dp")
    own = (configuration.num_stages, axes)
    return (*own, configuration.num_microbatches), own


def _turns(rows: Iterable[Sequence[Configuration]]) -> Iterator[Configuration]:
    """The first of every row, the second of every row, and so on."""
    for turn in zip_longest(*rows):
        yield from (configuration for configuration in turn if configuration is not None)
