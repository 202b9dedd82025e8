"""Which tensors the blocks of a plan keep for their backward: points of the frontier of each kind of block.

The search knows four levels. Of the best plans that rematerialise, the frontier of each kind of block is found for its
placement (``autopar.cost_model.memory.kept_frontier``). Where the kind that recomputes most goes from one corner to the
next as the price of memory rises, every kind has a best corner; those are a set of the plan. Stages are cut anew with
the sets beside the levels, under every schedule that is left open.

What a corner keeps may wait in host memory, all of it, or as much as the copies are hidden of: that takes no memory of
the device, and the seconds that the copies add (``autopar.cost_model.communication.host_copies``). Such points are part
of the frontier where they are below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import inf, sqrt
from typing import NamedTuple

from autopar.cost_model.memory.kept_frontier import PICOSECONDS, KeptSet, PricedForward, frontier
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.rule import Assignment
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.host_choices import host_links
from autopar.search.outer.offloads import has_room
from autopar.search.outer.other_schedules import best_schedule, open_shapes
from autopar.search.outer.speculation import Ahead, Job
from autopar.search.pricing.block_moves import layouts_of
from autopar.search.pricing.block_prices import Priced, evaluate
from autopar.search.pricing.kept_graph import kept_graph
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.kept_sets import KeptSets
from autopar.search.stages.stage import Stage

# Share of a step's time that other sets than those of the levels have to save, as a plan with them is longer to read.
# Chosen.
GAIN = 2e-3
# Other plans that sets are found for, and how much slower without them one of them may be. Chosen.
_RIVALS, _MOST_TO_GAIN = 4, 0.1


def best_kept(solver: Solver, best: Candidate, others: Iterable[Candidate]) -> Candidate:
    """``best``, or a faster plan, of the same ops or of those of the best of ``others``, whose blocks keep other
    tensors."""
    share = best.configuration.constraints.remat
    if isinstance(share, float):
        return with_share(solver, best, share)
    tried = [best]
    for other in sorted((one for one in others if not one.pruned), key=lambda one: one.step_time_s):
        if len(tried) > _RIVALS or other.step_time_s > best.step_time_s * (1 + _MOST_TO_GAIN):
            break
        if finds_sets(solver, other) and not any(_alike(other, one) for one in tried):
            tried.append(other)
    record_s = best.predicted.step_time_s * (1 - GAIN)

    def may_win(number: int) -> bool:
        return not number or _least_s(solver, tried[number]) < record_s

    def jobs() -> Iterator[Job]:
        return ((number, (number, record_s)) for number in range(len(tried)) if may_win(number))

    def solve(number: int, record_s: float) -> tuple[_Found, ...]:
        found = with_kept_sets(solver, tried[number], record_s)
        return () if found is None else (_Found.of(found),)

    ahead = Ahead(solve)
    with ahead.help() if len(tried) > 1 else nullcontext(), ahead.expecting(jobs):
        for number, candidate in enumerate(tried):
            if may_win(number):
                for found in ahead.answer(number, (number, record_s)):
                    if found.step_time_s < record_s:
                        best, record_s = found.on(candidate), found.step_time_s * (1 - GAIN)
    return best


class _Found(NamedTuple):
    """What another process has to say of a plan with other sets and stages than one that is known here."""

    configuration: Configuration
    kept: tuple[KeptSets, ...]
    priced: Priced
    stages: tuple[Stage, ...]
    estimate_s: float
    step_time_s: float

    @classmethod
    def of(cls, found: Candidate) -> _Found:
        plan = found.configuration, found.pricing.kept, found.priced, found.stages
        return cls(*plan, found.estimate_s, found.predicted.step_time_s)

    def on(self, known: Candidate) -> Candidate:
        """The plan, of the same ops as ``known``."""
        return replace(
            known,
            configuration=self.configuration,
            pricing=replace(known.pricing, kept=self.kept),
            priced=self.priced,
            stages=self.stages,
            estimate_s=self.estimate_s,
        )


def finds_sets(solver: Solver, found: Candidate) -> bool:
    """Whether sets of their own may make the plan faster: it recomputes something, and what is its own choice."""
    share = found.configuration.constraints.remat
    return share is None and solver.cluster.device.stack.keeps_any and found.is_rematerialised


def _alike(one: Candidate, other: Candidate) -> bool:
    a, b = one.configuration, other.configuration
    ours, theirs = ((c.num_stages, c.mesh.sizes, c.num_microbatches, c.zero) for c in (a, b))
    return ours == theirs


def _least_s(solver: Solver, found: Candidate) -> float:
    """Estimated seconds of a step if everything were kept, under the best schedule."""
    inner, configuration = Inner.of(found), found.configuration
    shapes = (configuration.pipelining, *open_shapes(solver, configuration))
    return min(solver.balanced_s(shape, inner) for shape in shapes)


def with_kept_sets(solver: Solver, found: Candidate, record_s: float = inf) -> Candidate | None:
    """The plan with its stages cut for all sets; None if sets are not open to it, or nothing fits. record_s: of a plan
    that takes longer nothing more need be known, and it may be None too."""
    if not finds_sets(solver, found):
        return None
    for on_host in (True, False):
        pricing = replace(found.pricing, kept=kept_sets(found.pricing, found.assignment, on_host=on_host))
        inner = _inner(found, pricing)
        own = solver.filled(found.configuration, inner, record_s)
        own = best_schedule(solver, found.configuration, inner, own, record_s=record_s)
        if own is None or has_room(own) or not any(own.predicted.host_bytes):
            return own
    return None


def with_share(solver: Solver, found: Candidate, share: float) -> Candidate:
    """The plan whose blocks all keep a share at most of what autograd would save, as far as they can. Raises
    InfeasiblePlan if that does not fit."""
    listed = []
    (every,) = _frontiers(found.pricing, found.assignment)
    for points in every:
        fitting = (point for point in points if point.num_bytes <= share * points[0].num_bytes)
        listed.append(next(fitting, points[-1]).listed)
    sets = KeptSets(name=f"keep{100 * share:g}", listed=tuple(listed), host=((),) * len(listed))
    inner = _inner(found, replace(found.pricing, kept=(sets,)))
    best = replace(solver, levels=()).filled(found.configuration, inner)
    if best is None:
        raise InfeasiblePlan(
            f"blocks that keep {share:.3g} of what autograd would save do not fit.\n"
            "  try: --remat full, or a smaller share"
        )
    return best


def _inner(found: Candidate, pricing: Pricing) -> Inner:
    return replace(Inner.of(found), pricing=pricing, given=None)


def kept_sets(pricing: Pricing, assignment: tuple[Assignment, ...], *, on_host: bool = True) -> tuple[KeptSets, ...]:
    """Sets for the blocks of a plan, those that keep most first. on_host: and then those with some in host memory,
    where the software and the device have that."""
    uses_host = on_host and pricing.ops.cluster.device.may_keep_on_host
    sets: dict[_Kept, str] = {}
    kinds = pricing.workload.repetition.kinds
    for every in _frontiers(pricing, assignment, host=uses_host):
        main = max(zip(every, kinds, strict=True), key=lambda own: own[0][-1].picoseconds * own[1].repeats)[0]
        # Picoseconds a byte, at which one corner costs as much as the next.
        turns = [(b.picoseconds - a.picoseconds) / (a.num_bytes - b.num_bytes) for a, b in pairwise(main)]
        prices = [*(sqrt(a * b) for a, b in pairwise(turns)), *(2 * price for price in turns[-1:])]
        for corner, price in zip(main[1:], prices, strict=True):
            best = [min(own, key=lambda point: point.picoseconds + price * point.num_bytes) for own in every]
            kept = _Kept(tuple(point.listed for point in best), tuple(point.host for point in best))
            name = f"keep{100 * (corner.num_bytes + corner.host_bytes) / main[0].num_bytes:.0f}"
            sets.setdefault(kept, _free(name + ("-host" if any(kept.host) else ""), sets.values()))
    return tuple(KeptSets(name=name, listed=kept.listed, host=kept.host) for kept, name in sets.items())


class _Kept(NamedTuple):
    """As of ``KeptSets``, of each kind of block."""

    listed: tuple[tuple[str, ...] | None, ...]
    host: tuple[tuple[str, ...], ...]


class _Point(NamedTuple):
    """A corner of a frontier. num_bytes: on the device. listed: what is kept, as a plan lists it; None of everything
    that autograd saves. host: what of that waits in host memory, with its bytes."""

    num_bytes: float
    picoseconds: float
    listed: tuple[str, ...] | None
    host: tuple[str, ...] = ()
    host_bytes: float = 0.0


def _frontiers(pricing: Pricing, assignment: tuple[Assignment, ...], *, host: bool = False) -> list[list[list[_Point]]]:
    """The frontiers of each kind of block, from everything on: without host memory, and one with it if ``host``."""
    layouts = layouts_of(pricing.workload, assignment)
    given = layouts.assignments, pricing.mesh, pricing.parts
    links = host_links(pricing, evaluate(replace(pricing, kept=()), assignment, shared_once=False)) if host else []
    found: list[list[list[_Point]]] = [[], []] if host else [[]]
    for kind, activations in enumerate(pricing.workload.kept(pricing.memory).blocks):
        forward = kept_graph(pricing, layouts, kind)
        points, waiting = [_Point(activations.saved_bytes(*given), 0.0, None)], []
        for corner in frontier(forward):
            names = _names(forward, corner)
            points.append(_Point(corner.num_bytes, corner.picoseconds, names))
            for sent in links[kind].choices(forward, corner, names) if links else ():
                picoseconds = corner.picoseconds + round(sent.added_s * PICOSECONDS)
                left = corner.num_bytes - sent.num_bytes
                waiting.append(_Point(left, picoseconds, names, sent.names, sent.num_bytes))
        for own, candidates in zip(found, (points, points + waiting), strict=False):
            own.append(_hull(candidates))
    return found


def _hull(points: list[_Point]) -> list[_Point]:
    """The corners of the lower hull, from the first point on."""
    first, *others = points
    found = [first]
    for point in sorted(others, key=lambda own: (-own.num_bytes, own.picoseconds)):
        if point.picoseconds and point.num_bytes < found[-1].num_bytes:
            while len(found) > 1 and (
                found[-1].picoseconds >= point.picoseconds or _is_above(found[-2], found[-1], point)
            ):
                found.pop()
            found.append(point)
    return found


def _is_above(one: _Point, between: _Point, other: _Point) -> bool:
    """Whether a point is no lower than the line between its neighbours."""
    first, second = one.num_bytes - between.num_bytes, between.num_bytes - other.num_bytes
    rises = (between.picoseconds - one.picoseconds) * second, (other.picoseconds - between.picoseconds) * first
    return rises[0] >= rises[1]


def _free(name: str, taken: Iterable[str]) -> str:
    taken, number, found = set(taken), 2, name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found


def _names(forward: PricedForward, kept: KeptSet) -> tuple[str, ...]:
    """As a plan lists what is kept, in the order of the ops."""
    names = (forward.graph.names[tensor][0] for tensor in forward.graph.names if tensor in kept.kept)
    return tuple(dict.fromkeys(names))
