"""The outer search: best first over pipeline degree, stage mesh, microbatches and ZeRO, with lower bounds.

A *mesh* is a pipeline degree P and a stage mesh of n = N / P ranks; a *partial configuration* adds the number of
microbatches M; a *configuration* adds ZeRO (stage and axes). Lower bounds on the seconds of a step:

    partial        (ideal(n, M) (M + P - 1) + M R) / P             if only naive, GPipe and 1F1B may run
                   max((ideal(n, M) + R) M / P, path(n, M))        else
    configuration  T / P + ideal(n, M) (P - 1) / P, or else T / P  T: optimum of the inner problem, gradient
                                                                   reductions at the slow-down they cause at least
                   the same with T - multiplier * room for T       T: of the inner problem with memory weighted
                   the same for all of a partial configuration     T: of one inner problem in which each parameter
                                                                   has the ZeRO that is best for it

since P stages of t_i seconds a microbatch take sum t_i + (M - 1) max t_i >= (sum t_i) (1 + (M - 1) / P) under 1F1B, no
schedule takes less than its busiest rank, which has M (sum t_i) / P to do at least, nor than a microbatch on its way
through all stages and back, and M sum t_i is at least T. ``ideal_division`` divides every op perfectly; R are the
seconds of recomputation that the memory demands at least. The bound with multipliers is Lagrangian duality
(``lagrangian_sweep``).

``baselines`` gives a first plan. Configurations like it are tried first (``Outer._turn``), then partial configurations
in the order of their estimates (``Outer.estimate_s``). The search stops when the best plan is as good as every bound
left, when the estimate of none left is shorter, or when it has worked for long and found nothing better; ``bound`` is
proved in any case. At each configuration the Lagrange multiplier of memory is swept; a configuration that fits at
multiplier 0 without rematerialisation needs no sweep. Of the plans within TOLERANCE of the best, and no slower than any
baseline, the search takes the one that is fastest with compute and communication on streams of their own
(``step_tasks``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.search.outer.baselines import Seeds
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver, job
from autopar.search.outer.known_configurations import Known, try_known
from autopar.search.outer.lagrangian_sweep import lagrangian_sweep
from autopar.search.outer.lower_bounds import Bounds
from autopar.search.outer.outcome import Outcome
from autopar.search.outer.space import Space
from autopar.search.outer.speculation import Job
from autopar.search.pricing.build_instance import Weights
from autopar.search.problem.constraints import Constraints, NoOption

# Half and twice of each give the same plans on two models, for as much more or less work as its comment says
# (docs/decisions/0021).

# A plan slower than the best possible by this share is good enough to stop. Chosen; 24 % less if doubled.
TOLERANCE = 0.005
# Blocks of a model times devices of its cluster, up to which a search tries every configuration that its bounds do not
# exclude, those of its baselines too, and takes the plan with the shortest step without a tolerance. Chosen.
SMALL_SPACE = 40
# Plans that are run stream by stream before one is taken. Chosen; 0 %.
MAX_FINAL = 4
# Work (see ``Solver``) after which the search settles for what it has, 2 to 10 s on one core, and that it may do
# after the seeds, or after a plan that was better, without another one. With half of this patience 84 of 193 clusters
# of two hosts on a slow network got a plan that was 4 to 9 % slower than the best; it is a few tenths of a second. 4 %
# less if MAX_WORK is halved; 26 % less and 58 % more for half and twice the patience.
MAX_WORK = 400_000
PATIENCE = 120_000
# Estimated least ratio of the step time of the best configuration on a mesh to that of the first tried there. Chosen;
# half and twice as far from 1: 29 % less and 15 % more.
SPREAD = 0.93
# Estimated least ratio to the step time of the best baseline with as many stages, whose axes have one role each.
# Chosen; likewise 2 % more.
BASELINE_SPREAD = 0.85


@dataclass(frozen=True, slots=True)
class _Partial:
    """A partial configuration: the ZeRO stage and axes of ``root`` are still open."""

    root: Configuration


class _Open(NamedTuple):
    """An entry of the queue, the least first. turn: see ``Outer._turn``. estimate_s: estimated seconds of a step.
    lower: lower bound on them."""

    turn: int
    estimate_s: float
    order: int
    lower: float
    item: Configuration | _Partial


class Progress(NamedTuple):
    """Progress of a search.

    share: of the work that it may do. best_s: seconds of a step of the best plan so far, None while there is none.
    bound_s: lower bound on every plan of the space. num_left: configurations that may still be tried.
    """

    share: float
    best_s: float | None
    bound_s: float
    num_left: int = 0


@dataclass(slots=True)
class Outer:
    """State of one outer search.

    offload: where tensors that ZeRO shards are.
    unproved: the least lower bound of the configurations that were tried; the plans found in them need not be their
    best.
    refusal: the error of the last configuration in which an op had no choice left.
    baselines: the best of each kind of baseline that was tried. candidates: every plan that fits.
    interrupted: by the user; ``best`` is the best plan until then.
    known: the best plans for other sizes. If one fits they are tried instead of the baselines and, unless the space is
    small, of all else.
    report: called now and then.
    """

    solver: Solver
    constraints: Constraints
    offload: Offload = Offload.NONE
    known: Sequence[Known] = ()
    max_work: int = MAX_WORK
    report: Callable[[Progress], object] = lambda progress: None
    interrupted: bool = False
    best: Candidate | None = None
    bound: float = 0.0
    num_skipped: int = 0
    unproved: float = inf
    refusal: NoOption | None = None
    closest: list[tuple[Configuration, Inner]] = field(default_factory=list)
    baselines: dict[str, tuple[Configuration, Outcome]] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    _slower: dict[Hashable, float] = field(default_factory=dict)
    _better_at: int = 0
    _left: int = 0
    _tolerance: float = TOLERANCE
    _order: Iterator[int] = field(default_factory=count)
    space: Space = field(init=False)
    bounds: Bounds = field(init=False)
    is_small: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_small = self.solver.workload.num_blocks * self.solver.cluster.num_gpus <= SMALL_SPACE
        self.space = Space(solver=self.solver, constraints=self.constraints, offload=self.offload)
        self.bounds = Bounds(solver=self.solver, constraints=self.constraints, offload=self.offload)

    def run(self) -> Candidate | None:
        """The best plan, the best so far if interrupted; ``bound`` is a lower bound on every plan of the space, in
        seconds."""
        self.bound = min((lower for _, _, _, lower in self._partials()), default=inf)
        try:
            return self._run()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
            self.bound = min(self.bound, self.best.step_time_s)
            return self.best

    def _partials(self) -> Iterator[tuple[int, Mesh, int, float]]:
        """Pipeline degrees, stage meshes and numbers of microbatches, with a lower bound on the seconds of a step."""
        for num_stages, mesh in self.space.nodes():
            for num in self.space.microbatches(mesh, self.constraints):
                yield num_stages, mesh, num, self.bounds.ideal_s(num_stages, num)

    def _say(self) -> None:
        best = None if self.best is None else self.best.step_time_s
        self.report(Progress(min(1.0, self.solver.work / self.max_work), best, self.bound, self._left))

    def _run(self) -> Candidate | None:
        self.seed()
        too_large = not self.offload and self.solver.least_state_bytes > self.solver.budget_bytes
        if self.best is None and self.closest and too_large:
            return None
        heap: list[_Open] = []
        for num_stages, mesh, num, lower in self._partials():
            estimate_s = self.bounds.estimate_s(num_stages, num)
            for partial in map(_Partial, self.space.roots(num_stages, mesh, num, self.constraints)):
                heapq.heappush(heap, _Open(self._turn(partial), estimate_s, next(self._order), lower, partial))
        # The bounds of the baselines are no better than those of the configurations that contain them.
        self.unproved = inf
        self._better_at = self.solver.work

        def next_configurations() -> Iterator[Job]:
            for _, _, _, lower, item in heapq.nsmallest(3, heap):
                variants = (item,) if isinstance(item, Configuration) else tuple(self.space.variants(item.root))
                if variants and not self.good_enough(lower):
                    yield job(variants, Weights(sync=0.0), self.record_s)

        with self.solver.ahead.expecting(next_configurations):
            while heap and not self._settled():
                turn, estimate_s, _, lower, item = heapq.heappop(heap)
                likely_s = max(estimate_s, self.estimate_s(item if isinstance(item, Configuration) else item.root))
                if self.good_enough(lower if self.is_small else max(estimate_s, lower)):
                    self.num_skipped += 1
                    self.unproved = min(self.unproved, lower)
                elif heap and likely_s > estimate_s and (turn, likely_s) > heap[0][:2]:
                    heapq.heappush(heap, _Open(turn, likely_s, next(self._order), lower, item))
                elif isinstance(item, Configuration):
                    self._left = len(heap)
                    self.expand(item)
                    self.bound = max(self.bound, min(self.unproved, min((one.lower for one in heap), default=inf)))
                    self._say()
                else:
                    for configuration, least in self._configurations(item.root, lower):
                        heapq.heappush(
                            heap, _Open(self._turn(configuration), estimate_s, next(self._order), least, configuration)
                        )
        if self.is_small:
            self._close()
        self.num_skipped += len(heap)
        if self.best is not None:
            left = min((one.lower for one in heap), default=inf)
            self.bound = min(left, self.unproved, self.best.step_time_s)
        return self.best

    def _close(self) -> None:
        """Try the configurations whose axes have one role each, as a user pins them, at every ZeRO stage.

        Free axes contain them, but the objective of the inner problem is not the prediction: its answer for free axes
        need not be the best that is predicted.
        """
        configurations = [
            (self.bounds.ideal_s(root.num_stages, root.num_microbatches), configuration)
            for root in self.space.with_roles()
            for configuration in self.space.variants(root)
        ]
        for lower, configuration in sorted(configurations, key=lambda one: one[0]):
            if self._settled() or self.good_enough(lower):
                break
            self.expand(configuration)

    def _turn(self, item: Configuration | _Partial) -> int:
        """Order in which configurations are tried: first those that differ from the best plan so far only in the roles
        of their axes, then in their sizes, then in the ZeRO stage, and those with another pipeline last."""
        if self.best is None:
            return 0
        best, own = self.best.configuration, item if isinstance(item, Configuration) else item.root
        if (own.num_stages, own.num_microbatches) != (best.num_stages, best.num_microbatches):
            return 4
        other_stage = isinstance(item, Configuration) and own.zero != best.zero
        return 2 * other_stage + (sorted(own.mesh.sizes) != sorted(best.mesh.sizes))

    def _configurations(self, root: Configuration, lower: float) -> Iterator[tuple[Configuration, float]]:
        """The configurations of a partial one, unless their common bound prunes them, with a lower bound on their
        seconds."""
        variants = tuple(self.space.variants(root))
        if len(variants) > 1:
            # One inner problem that none of theirs has a better answer than.
            try:
                objective = self.solver.least(variants)
            except NoOption as error:
                self.refuse(error)
                return
            lower, likely = self.bounds.pipelined(objective, root), self.solver.least_s(root, objective)
            if self._prune(lower, likely):
                self._learn((root.num_stages, root.mesh.sizes), root, max(lower, likely))
                return
        yield from ((configuration, lower) for configuration in variants)

    def _prune(self, lower: float, likely: float) -> bool:
        """Whether plans that take ``lower`` seconds at least, and ``likely`` by estimate, are pruned; counts them if
        so.

        The estimate leaves out memory and unequal stages, which only make plans slower. It is no proof.
        """
        pruned = not self.is_small and likely >= self.record_s
        if self.best is None or not (self.good_enough(lower) or pruned):
            return False
        self.num_skipped += 1
        self.unproved = min(self.unproved, lower)
        return True

    def _settled(self) -> bool:
        """Whether the search has spent its work."""
        if self.best is None:
            return self.solver.work >= 3 * self.max_work
        if self.is_small:
            return self.solver.work >= self.max_work
        return bool(self.known) or self.solver.work >= min(self.max_work, self._better_at + PATIENCE)

    @property
    def record_s(self) -> float:
        """Seconds of a step of the best plan so far; inf without one."""
        return inf if self.best is None else self.best.step_time_s

    def estimate_s(self, configuration: Configuration) -> float:
        """Estimated seconds of a step of a configuration: that of its partial configuration, times the smallest ratios
        of step time to estimate observed for baselines with as many stages and for configurations on its mesh."""
        stages, sizes = configuration.num_stages, configuration.mesh.sizes
        slower = max(BASELINE_SPREAD * self._slower.get(stages, 1.0), SPREAD * self._slower.get((stages, sizes), 1.0))
        return self.bounds.estimate_s(stages, configuration.num_microbatches) * max(1.0, slower)

    def _learn(self, alike: Hashable, configuration: Configuration, seconds: float) -> None:
        """Record the smallest observed ratio of step time to the estimate of the partial configuration, in the group
        ``alike``."""
        slower = seconds / self.bounds.estimate_s(configuration.num_stages, configuration.num_microbatches)
        self._slower[alike] = min(slower, self._slower.get(alike, inf))

    def good_enough(self, lower: float) -> bool:
        """Whether no plan of at least ``lower`` seconds a step improves on the best plan by more than the tolerance."""
        return self.best is not None and lower >= self.best.step_time_s * (1 - self._tolerance)

    def seed(self) -> None:
        """Try the baselines; none of them may beat the result by however little, so without a tolerance."""
        # What people would do without a search is not to be better by however little.
        self._tolerance = 0.0
        try_known(self, self.known)
        if self.best is None:
            self.known = ()
            Seeds(self).run()
        self._tolerance = 0.0 if self.is_small else TOLERANCE

    def note(self, configuration: Configuration, outcome: Outcome) -> None:
        """Record the outcome of a baseline: for the table of baselines, and for the estimates of configurations with as
        many stages."""
        self._say()
        name = configuration.kind
        known = self.baselines.get(name)
        # One with a plan says more than one that was passed over.
        if known is None or (outcome.step_time_s is None, outcome.least_s) < (
            known[1].step_time_s is None,
            known[1].least_s,
        ):
            self.baselines[name] = configuration, outcome
        if outcome.step_time_s is not None:
            self._learn(configuration.num_stages, configuration, outcome.step_time_s)

    def try_baseline(self, configuration: Configuration, *, relaxed: bool = False) -> Outcome:
        """Try a configuration, unless its bounds prune it. relaxed: see ``expand``."""
        known = self.known_of(configuration)
        if known is None:
            return self.expand(configuration, relaxed=relaxed)
        self.num_skipped += 1
        return known

    def known_of(self, configuration: Configuration) -> Outcome | None:
        """The outcome of a configuration that its memory or bound prunes without solving it; None if neither does."""
        if self.best is not None and self.solver.least_state_of(configuration) > self.solver.budget_bytes:
            return Outcome(None, inf)
        least_s = self.bounds.ideal_s(configuration.num_stages, configuration.num_microbatches)
        return Outcome(None, least_s) if self.good_enough(least_s) else None

    def refuse(self, error: NoOption) -> None:
        """Count a configuration in which an op has no choice left, and keep the error for the report."""
        self.refusal = error
        self.num_skipped += 1

    def expand(self, configuration: Configuration, *, relaxed: bool = False) -> Outcome:
        """Try a configuration: first with memory free of charge, then, unless ``relaxed``, at rising Lagrange
        multipliers."""
        try:
            return self._expand(configuration, relaxed)
        except NoOption as error:
            self.refuse(error)
            return Outcome(None, inf)

    def _expand(self, configuration: Configuration, relaxed: bool) -> Outcome:
        solver = self.solver
        inner = solver.inner(configuration, Weights(sync=0.0))
        lower = self.bounds.pipelined(inner.objective, configuration)
        likely = 0.0 if self.best is None else solver.likely_s(configuration, inner, self.record_s)
        self._learn((configuration.num_stages, configuration.mesh.sizes), configuration, max(lower, likely))
        if self._prune(lower, likely):
            return Outcome(None, max(lower, likely))
        first = self.consider(configuration, inner, relaxed=relaxed)
        if relaxed:
            self.unproved = min(self.unproved, lower)
            return Outcome(None, max(lower, likely)) if first is None else Outcome(first.step_time_s, first.step_time_s)
        if first is not None and first.step_time_s > lower * (1 + TOLERANCE):
            exposed = solver.inner(configuration, Weights(sync=1.0))
            if exposed.assignment != inner.assignment:
                other = self.consider(configuration, exposed)
                if other is not None and other.step_time_s < first.step_time_s:
                    first = other
        if first is None and self.best is None and self.too_large(configuration, inner):
            self.num_skipped += 1
            return Outcome(None, inf)
        if first is not None and not first.is_rematerialised:
            self.unproved = min(self.unproved, lower)
            return Outcome(first.step_time_s, first.step_time_s)
        before, pruned = first, False
        for answer, bound in lagrangian_sweep(solver, self.bounds, configuration, inner):
            lower = max(lower, bound)
            pruned = self.good_enough(lower)
            if pruned:
                self.num_skipped += 1
                break
            if answer is None:
                continue
            found = self.consider(configuration, answer)
            if found is not None:
                slower = before is not None and found.step_time_s >= before.step_time_s
                if not slower:
                    before = found
                if slower or not found.is_rematerialised:
                    break
        self.unproved = min(self.unproved, lower)
        if before is not None:
            return Outcome(before.step_time_s, before.step_time_s)
        return Outcome(None, lower if pruned else inf)

    def too_large(self, configuration: Configuration, inner: Inner) -> bool:
        """Whether the model state alone excludes a configuration. Before anything fits only size matters."""
        multiplier = 1e6 * inner.objective / self.solver.budget_bytes
        leanest = self.solver.inner(configuration, Weights(sync=0.0, state=multiplier))
        self.closest.append((configuration, leanest))
        state = sum(block.states.total for block in leanest.priced.blocks)
        return state > configuration.num_stages * self.solver.budget_bytes

    def consider(
        self,
        configuration: Configuration,
        inner: Inner,
        *,
        relaxed: bool = False,
        try_first: tuple[str, int] | None = None,
    ) -> Candidate | None:
        """Complete an answer to a plan and record it if it is the best so far; None if nothing fits. relaxed: under the
        first schedule that it fits with. try_first: a schedule and its virtual stages, tried before others."""
        found = self.solver.complete(configuration, inner, self.record_s, relaxed=relaxed, try_first=try_first)
        if found is None:
            self.closest.append((configuration, inner))
            return None
        if self.best is None or found.step_time_s < self.best.step_time_s:
            if not self.good_enough(found.step_time_s):
                self._better_at = self.solver.work
            self.best = found
        self.candidates.append(found)
        return found

    @property
    def baseline_s(self) -> float:
        """Seconds of a step of the fastest baseline that has a plan; inf without one."""
        times = (outcome.step_time_s for _, outcome in self.baselines.values())
        return min((seconds for seconds in times if seconds is not None), default=inf)

    def final(self) -> Candidate | None:
        """Of the plans that are as good as the best, the one whose step is shortest when simulated with streams."""
        if self.best is None:
            return None
        limit = min(self.best.step_time_s * (1 + self._tolerance), self.baseline_s)
        known = (c for c in self.candidates if not c.pruned and c.step_time_s <= limit)
        good = sorted(known, key=lambda c: c.step_time_s)[:MAX_FINAL]
        return min(good, key=lambda c: c.predicted.overlapped_s) if len(good) > 1 else self.best
