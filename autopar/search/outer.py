"""The outer search: pipeline degree, stage mesh, microbatches, ZeRO; the most promising first, with lower bounds.

A *mesh* is a pipeline degree P and a stage mesh of n = N / P ranks; a *pace* adds the number of microbatches M; a
*leaf* adds ZeRO (level and axes). Lower bounds on the seconds of a step:

    pace    (floor(n, M) (M + P - 1) + M again) / P           if only naive, GPipe and 1F1B may run
            max((floor(n, M) + again) M / P, path(n, M))      else
    leaf    T / P + floor(n, M) (P - 1) / P, or else T / P    T: optimum of the inner problem, gradient sums at the
                                                              slow-down they cause at least
            the same with T - price * room for T              T: with memory at a price

since P stages of t_i seconds a microbatch take sum t_i + (M - 1) max t_i >= (sum t_i) (1 + (M - 1) / P) under 1F1B, no
schedule takes less than its busiest rank, which has M (sum t_i) / P to do at least, nor than a microbatch on its way
through all stages and back, and M sum t_i is at least T. ``floor`` divides every op perfectly; ``again`` is what has to
run again in backward for the memory there is. The last line is Lagrangian duality (``Outer.dearer``).

Paces are tried in the order of their bounds with the bubble that is likely. It stops when the best plan is as good as
every bound left, when none left is likely to be better, or when it has worked enough; ``bound`` is what is proved in
any case. At each leaf the price of memory is swept; a leaf that fits for free without rematerialisation is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, count, zip_longest

from autopar.ir.mesh import Mesh
from autopar.search.build import Weights
from autopar.search.constraints import Constraints, NoOption, divisors, role_of_axis
from autopar.search.leaf import HIDDEN, Candidate, Configuration, Inner, Solver
from autopar.search.roles import divides_experts_axes

# Memory prices tried at a leaf that does not fit for free: multiples of (step time) / (memory budget).
PRICES = (0.02, 0.1, 0.5, 2.0, 10.0)

# Passes of a stage that are waited for on the way through the others, under the best schedule there is as a rule.
LIKELY_BUBBLE = 1 / 3

# A plan this share slower than the best possible is good enough to stop.
TOLERANCE = 0.005

# Work (see ``leaf.Solver``) after which the search settles for what it has; 3 to 7 s on one core.
MAX_WORK = 250_000

# Part of it that the baselines may take, and that they and their neighbours may.
BASELINE_SHARE = 0.5
SEED_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class _Pace:
    """A configuration whose ZeRO is still open."""

    root: Configuration


@dataclass(slots=True)
class Outer:
    """State of one outer search.

    offload: whether what ZeRO shards is in host memory.
    unproved: the least lower bound of the leaves that were tried; what was found in them need not be their best.
    refusal: why the last configuration in which an op had no choice left was passed over.
    """

    solver: Solver
    constraints: Constraints
    offload: bool = False
    max_work: int = MAX_WORK
    best: Candidate | None = None
    bound: float = 0.0
    num_skipped: int = 0
    unproved: float = float("inf")
    refusal: NoOption | None = None
    closest: list[tuple[Configuration, Inner]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _floors: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self) -> Candidate | None:
        """The best plan; ``bound`` is what no plan of the space can beat."""
        self.seed()
        too_large = not self.offload and self.solver.least_state_bytes > self.solver.budget_bytes
        if self.best is None and self.closest and too_large:
            return None
        heap: list[tuple[float, int, float, Configuration | _Pace]] = []
        for num_stages, mesh in self.nodes(self.constraints):
            for num in self.microbatches(self.constraints, mesh):
                hope, lower = self.hope(num_stages, num), self.floor(num_stages, num)
                for root in self.roots(num_stages, mesh, num, self.constraints):
                    heapq.heappush(heap, (hope, next(self._order), lower, _Pace(root)))
        # The bounds of the baselines are no better than those of the leaves that contain them.
        self.unproved = float("inf")
        while heap:
            spent = self.solver.work / (1 if self.best is not None else 3)
            if self.good_enough(heap[0][0]) or spent >= self.max_work:
                break
            hope, _, lower, item = heapq.heappop(heap)
            if self.good_enough(lower):
                self.num_skipped += 1
                self.unproved = min(self.unproved, lower)
            elif isinstance(item, Configuration):
                self.expand(item)
            else:
                for leaf in self.variants(item.root):
                    heapq.heappush(heap, (hope, next(self._order), lower, leaf))
        self.num_skipped += len(heap)
        if self.best is not None:
            left = min((lower for _, _, lower, _ in heap), default=float("inf"))
            self.bound = min(left, self.unproved, self.best.step_time_s)
        return self.best

    def good_enough(self, lower: float) -> bool:
        return self.best is not None and lower >= self.best.step_time_s * (1 - TOLERANCE)

    # The space.

    def nodes(self, constraints: Constraints) -> Iterator[tuple[int, Mesh]]:
        """Pipeline degrees and stage meshes."""
        num_gpus, num_blocks = self.solver.cluster.num_gpus, self.solver.load.num_blocks
        for num_stages in divisors(num_gpus) if constraints.pp is None else (constraints.pp,):
            if num_stages <= num_blocks and num_gpus % num_stages == 0:
                for mesh in constraints.meshes(num_gpus // num_stages):
                    yield num_stages, mesh

    def microbatches(self, constraints: Constraints, mesh: Mesh) -> tuple[int, ...]:
        """Numbers of microbatches to consider, ascending."""
        batch = self.solver.load.captured.batch_size
        dividing = ("dp", "ep") if divides_experts_axes(batch, mesh, constraints) else ("dp",)
        pinned = 1
        for axis in mesh.axes:
            if role_of_axis(axis.name) in dividing:
                pinned *= axis.size
        if self.solver.load.obstacle is not None:
            options: tuple[int, ...] = (1,)
        elif constraints.num_microbatches is not None:
            options = (constraints.num_microbatches,)
        else:
            options = divisors(batch)
        kept = [m for m in options if batch % (m * pinned) == 0]
        if constraints.microbatch_size is not None:
            size = constraints.microbatch_size
            kept = [m for m in kept if batch % (m * size) == 0 and mesh.size % (batch // (m * size)) == 0]
        return tuple(kept)

    def roots(self, num_stages: int, mesh: Mesh, num: int, constraints: Constraints) -> Iterator[Configuration]:
        """The configuration without ZeRO, under the plainest schedule; none if there is no schedule for it."""
        root = Configuration(
            num_stages=num_stages,
            mesh=mesh,
            num_microbatches=num,
            zero=0,
            data_axes=(),
            constraints=constraints,
        )
        for shape in self.solver.shapes(root)[:1]:
            yield replace(root, schedule=shape.schedule, virtual_stages=shape.virtual_stages)

    def variants(self, root: Configuration) -> Iterator[Configuration]:
        """``root`` with each ZeRO level and set of data axes, the cheapest in time first."""
        mesh, constraints = root.mesh, root.constraints
        for batch_axes in self.batch_axes(root):
            base = replace(root, batch_axes=batch_axes)
            sharded = False
            for axes in constraints.shard_axes(mesh):
                sharded = True
                for level in constraints.levels():
                    if not (level == 2 and root.num_microbatches == 1 and constraints.zero is None):
                        yield replace(base, zero=level, data_axes=axes, offload=self.offload)
            if self._may_be_whole() and (constraints.zero in (None, 0) or not sharded):
                yield base

    def _may_be_whole(self) -> bool:
        return self.constraints.may_be_whole() and not self.offload

    def batch_axes(self, root: Configuration) -> list[tuple[int, ...] | None]:
        """Sets of axes that divide the inputs, if the microbatch size is pinned; else [None]: left open."""
        size = root.constraints.microbatch_size
        if size is None:
            return [None]
        degree = self.solver.load.captured.batch_size // (root.num_microbatches * size)
        found: list[tuple[int, ...] | None] = []
        for number in range(len(root.mesh) + 1):
            for axes in combinations(range(len(root.mesh)), number):
                product = 1
                for axis in axes:
                    product *= root.mesh.axes[axis].size
                named = all(axis in axes for axis, n in enumerate(root.mesh.names) if role_of_axis(n) == "dp")
                able = all(root.constraints.may(root.mesh.names[axis], "dp") for axis in axes)
                if product == degree and named and able:
                    found.append(axes)
        return found

    def baselines(self) -> Iterator[Configuration]:
        """DDP, FSDP, and tensor or expert parallelism with pipelines and data parallelism outside.

        All are in the space; with their axes' roles given they are solved at once, and what they achieve
        excludes most of it.
        """
        given = self.constraints
        if given.axes is not None or given.microbatch_size is not None:
            return
        num_gpus, node = self.solver.cluster.num_gpus, self.solver.cluster.gpus_per_node
        for num_stages in divisors(num_gpus) if given.pp is None else (given.pp,):
            if num_stages > self.solver.load.num_blocks:
                continue
            size = num_gpus // num_stages
            for tensor in divisors(min(size, node)) if given.tp is None else (given.tp,):
                for experts in self._expert_degrees(size, tensor):
                    inner = tensor * experts
                    if size % inner or (given.dp or size // inner) * inner != size or (given.cp or 1) > 1:
                        continue
                    named = replace(given, pp=num_stages, dp=size // inner, tp=tensor, cp=1, ep=experts)
                    for mesh in named.meshes(size, node if given.dp is None and experts == 1 else None):
                        # The dense part divides the batch over the ranks of the experts too.
                        rows = self.solver.load.captured.batch_size // (mesh.size // tensor)
                        options = self.microbatches(named, mesh)
                        dividing = tuple(num for num in options if rows and rows % num == 0)
                        for num in self._few(dividing or options, num_stages):
                            yield from self.roots(num_stages, mesh, num, named)

    def _expert_degrees(self, size: int, tensor: int) -> tuple[int, ...]:
        """Degrees of expert parallelism on ``size`` ranks: none, the most inside a node, the most of all."""
        if self.constraints.ep is not None:
            return (self.constraints.ep,)
        if tensor > 1 or not self.solver.load.experts:
            return (1,)
        possible = [e for e in divisors(min(self.solver.load.experts)) if size % e == 0]
        inside = max(e for e in possible if e <= self.solver.cluster.gpus_per_node)
        return tuple(sorted({1, inside, max(possible)}))

    def seed(self) -> None:
        """A good plan to begin with: baselines at their leanest, then the neighbours of the best few.

        Pipeline degrees take turns, each with its most promising baseline next.
        """
        tried: set[Configuration] = set()
        found: list[tuple[float, int, Configuration]] = []

        def attempt(configuration: Configuration, share: float) -> None:
            if configuration in tried or (self.solver.work >= self.max_work * share and self.best is not None):
                return
            tried.add(configuration)
            if self.solver.least_state_of(configuration) > self.solver.budget_bytes and self.best is not None:
                self.num_skipped += 1
                return
            if self.good_enough(self.floor(configuration.num_stages, configuration.num_microbatches)):
                self.num_skipped += 1
                return
            seconds = self.expand(configuration)
            if seconds is not None:
                found.append((seconds, len(tried), configuration))

        turns: dict[int, list[Configuration]] = {}
        for root in sorted(self.baselines(), key=lambda c: self.hope(c.num_stages, c.num_microbatches)):
            turns.setdefault(root.num_stages, []).extend(self._with_zero(root)[-1:])
        for turn in zip_longest(*turns.values()):
            for leanest in turn:
                if leanest is not None:
                    attempt(leanest, BASELINE_SHARE)
        for _, _, best in sorted(found)[:4]:
            options = self.microbatches(best.constraints, best.mesh)
            near = options.index(best.num_microbatches)
            for num in options[max(0, near - 1) : near + 2]:
                for root in self.roots(best.num_stages, best.mesh, num, best.constraints):
                    for configuration in self._with_zero(root):
                        attempt(configuration, SEED_SHARE)

    def _with_zero(self, root: Configuration) -> list[Configuration]:
        """A baseline at every level of ZeRO, the one with the least memory last."""
        data = next(root.constraints.shard_axes(root.mesh), ())
        if not data or not root.constraints.levels():
            return [replace(root, zero=root.constraints.zero or 0)] if self._may_be_whole() else []
        levels = root.constraints.levels()
        return [replace(root, zero=level, data_axes=data, offload=self.offload) for level in levels]

    def _few(self, options: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
        """Numbers of microbatches worth trying first: around eight for each stage, and four times that."""
        if num_stages == 1:
            return options[:4]
        wanted = (8 * num_stages, 32 * num_stages)
        return (
            tuple(dict.fromkeys(min(options, key=lambda m: (abs(m - goal), m)) for goal in wanted)) if options else ()
        )

    # Bounds and leaves.

    def floor(self, num_stages: int, num_microbatches: int) -> float:
        """Seconds of a step in which everything is perfectly divided, with the bubble and rematerialisation."""
        key = (num_stages, num_microbatches)
        if key not in self._floors:
            floor, ranks = self.solver.floor, self.solver.cluster.num_gpus // num_stages
            once = floor.microbatch_s(ranks, num_microbatches)
            passes = num_microbatches + self.bubble * (num_stages - 1)
            again = num_microbatches * self._again_s(ranks, num_stages, num_microbatches)
            busy = (once * passes + again) / num_stages
            if self.may_be_naive(num_stages):
                busy = min(busy, num_microbatches * once)
            self._floors[key] = max(busy, floor.path_s(ranks, num_microbatches))
        return self._floors[key]

    def hope(self, num_stages: int, num_microbatches: int) -> float:
        """The same with the bubble that the best of the schedules is likely to have."""
        floor = self.floor(num_stages, num_microbatches)
        if self.bubble or num_stages == 1:
            return floor
        waited = LIKELY_BUBBLE * (num_stages - 1) / num_stages
        ranks = self.solver.cluster.num_gpus // num_stages
        return floor + waited * self.solver.floor.microbatch_s(ranks, num_microbatches)

    def _again_s(self, ranks: int, num_stages: int, num_microbatches: int) -> float:
        """Seconds that a microbatch runs again at least, in all stages, for a rank's memory."""
        if len(self.solver.levels) == 1:
            return 0.0
        live, room = self.solver.room(num_stages, num_microbatches, self.constraints)
        state = 0.0 if self.offload else self.solver.least_state_bytes * num_stages
        return self.solver.floor.again_s(ranks, num_microbatches, (room - state) / live)

    def may_be_naive(self, num_stages: int) -> bool:
        """Whether a rank may have a single microbatch, and nothing to do while others have it."""
        return num_stages > 1 and self.constraints.schedule in (None, "naive")

    @property
    def bubble(self) -> int:
        """What is sure to be waited for: P - 1 passes under plain schedules, nothing under others."""
        return int(self.constraints.schedule in ("naive", "gpipe", "1f1b"))

    def pipelined(self, stage_s: float, configuration: Configuration) -> float:
        """Bound on a step whose ops take ``stage_s`` seconds in all on one stage mesh, sums of gradients included."""
        stages, num = configuration.num_stages, configuration.num_microbatches
        bubble = self.solver.floor.microbatch_s(configuration.mesh.size, num) * (stages - 1) / stages
        return max(stage_s / stages + self.bubble * bubble, self.floor(stages, num))

    def refuse(self, error: NoOption) -> None:
        self.refusal = error
        self.num_skipped += 1

    def expand(self, configuration: Configuration) -> float | None:
        """Try a leaf: first with memory for free, then at rising prices. Returns the seconds of its best plan."""
        try:
            return self._expand(configuration)
        except NoOption as error:
            self.refuse(error)
            return None

    def _expand(self, configuration: Configuration) -> float | None:
        solver = self.solver
        inner = solver.inner(configuration, Weights(sync=HIDDEN))
        lower = self.pipelined(inner.objective, configuration)
        if self.good_enough(lower):
            self.num_skipped += 1
            self.unproved = min(self.unproved, lower)
            return None
        if self.best is not None and solver.likely_s(configuration, inner) >= self.best.step_time_s:
            # Memory and stages that are not alike only make it slower. That is no proof.
            self.num_skipped += 1
            self.unproved = min(self.unproved, lower)
            return None
        first = self.consider(configuration, inner)
        if first is not None and first.step_time_s > lower * (1 + TOLERANCE):
            exposed = solver.inner(configuration, Weights(sync=1.0))
            if exposed.leaders != inner.leaders:
                other = self.consider(configuration, exposed)
                if other is not None and other.step_time_s < first.step_time_s:
                    first = other
        if first is None and self.best is None and self.too_large(configuration, inner):
            self.num_skipped += 1
            return None
        if first is not None and not first.is_rematerialised:
            self.unproved = min(self.unproved, lower)
            return first.step_time_s
        before = first
        for answer, bound in self.dearer(configuration, inner):
            lower = max(lower, bound)
            if self.good_enough(lower):
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
        return None if before is None else before.step_time_s

    def dearer(self, configuration: Configuration, inner: Inner) -> Iterator[tuple[Inner | None, float]]:
        """Answers at rising prices of memory, each once, and what they say about all plans of a leaf.

        The memory of a plan is at most ``room``, so for any price the optimum of seconds + price * memory less price *
        room is a lower bound on the seconds (Lagrangian duality). An answer that is best at two prices is best between
        them.
        """
        solver = self.solver
        _, room = solver.room(configuration.num_stages, configuration.num_microbatches, configuration.constraints)
        naive = self.may_be_naive(configuration.num_stages)

        def at(price: float) -> tuple[Inner, float]:
            seconds = price * inner.objective / solver.budget_bytes
            answer = solver.inner(configuration, solver.memory_weights(configuration, seconds))
            bound = self.pipelined(answer.objective - seconds * room, configuration)
            return answer, min(bound, inner.objective) if naive else bound

        last = inner.leaders
        leanest, bound = at(PRICES[-1])
        yield None, bound
        for price in PRICES[:-1]:
            answer, bound = at(price)
            yield answer if answer.leaders != last else None, bound
            last = answer.leaders
            if leanest.leaders == last:
                return
        yield leanest, bound

    def too_large(self, configuration: Configuration, inner: Inner) -> bool:
        """Whether the model state alone excludes a leaf. Before anything fits only size matters."""
        price = 1e6 * inner.objective / self.solver.budget_bytes
        leanest = self.solver.inner(configuration, Weights(sync=HIDDEN, state=price))
        self.closest.append((configuration, leanest))
        state = sum(block.states.total for block in leanest.priced.blocks)
        return state > configuration.num_stages * self.solver.budget_bytes

    def consider(self, configuration: Configuration, inner: Inner) -> Candidate | None:
        """Complete an answer; keep it if it is the best so far."""
        record_s = float("inf") if self.best is None else self.best.step_time_s
        found = self.solver.complete(configuration, inner, record_s)
        if found is None:
            self.closest.append((configuration, inner))
            return None
        if self.best is None or found.step_time_s < self.best.step_time_s:
            self.best = found
        return found
