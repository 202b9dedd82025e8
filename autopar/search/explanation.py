"""Why an op of a plan is placed as it is: what follows from it, and what the next best placements would cost.

A runner-up is what the search finds where everything is as in the plan (mesh, pipeline, schedule, microbatches, ZeRO)
but the op may not have its placement; the next one where it may not have either. All other ops, the stage cuts and
rematerialisation adapt, so the price is that of the whole plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.seconds import ZERO, OpTime
from autopar.ir.errors import InfeasiblePlan, InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan, Prediction
from autopar.search.api import predict_plan, priced_plan, search_captured
from autopar.search.communications import Communication, communications
from autopar.search.forbidden import Forbidden, deciding_ops
from autopar.search.like import constraints_like, forbidden_like, with_axes_of
from autopar.search.workload import Workload

# Networks that are tried for a runner-up to be better on: this times as fast.
_SPEEDS = (2.0, 4.0, 8.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What the plan would be if an op were placed otherwise.

    placement: (mesh axis, factor, None for replicated). plan: with its prediction; None if nothing fits, with the
    reason. better_at: the network's speed over the present one's, nearest to 1, at which this plan would be the faster
    one; None if at none that was tried.
    """

    placement: tuple[tuple[str, str | None], ...]
    plan: Plan | None
    reason: str = ""
    better_at: float | None = None

    @property
    def prediction(self) -> Prediction | None:
        return None if self.plan is None else self.plan.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """block, op: as in the plan. repeats: of the block. followers: ops that are placed with this one. time: of the op
    and its followers, a microbatch on one rank. step_time_s: of the plan, as predicted now. peak_share: of the
    memory that a plan may take."""

    block: str
    op: str
    repeats: int
    placement: tuple[tuple[str, str | None], ...]
    followers: tuple[str, ...]
    factors: tuple[str, ...]
    time: OpTime
    communications: tuple[Communication, ...]
    step_time_s: float
    peak_share: float
    alternatives: tuple[Alternative, ...]


def find_op(load: Workload, name: str) -> tuple[str, str]:
    """(block, op) that ``name`` means, as ``OP`` or ``BLOCK/OP``. Raises InvalidInput where that is none or several."""
    known = [(block, op) for block, op, _ in deciding_ops(load)]
    found = [pair for pair in known if Forbidden(pattern=name, placement=()).matches(*pair)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{block}/{op}" for block, op in found[:8])
        raise InvalidInput(
            f"{name!r} is {len(found)} ops: {names}{' ...' if len(found) > 8 else ''}.\n  try: one of them"
        )
    following = [
        (load.folding.key[member], load.folding.key[group.leader])
        for group in load.clusters.clusters
        for member in group.members[1:]
        if group.leader is not None and load.folding.key.get(member) == name
    ]
    if following:
        raise InvalidInput(f"{name!r} is placed as {following[0][1]!r} is.\n  try: that one")
    close = difflib.get_close_matches(name, [op for _, op in known], n=3, cutoff=0.3)
    raise InvalidInput(f"the plan places no op {name!r}.\n  names like it: {', '.join(dict.fromkeys(close)) or 'none'}")


def explain_op(
    captured: CapturedModel,
    cluster: Cluster,
    plan: Plan,
    name: str,
    *,
    count: int = 2,
    progress: Callable[[str], object] = lambda doing: None,
) -> Explanation:
    """Explain the op ``name`` of ``plan`` with the ``count`` next best placements. Raises InvalidInput."""
    load = Workload.of(captured, plan.precision)
    block, op = find_op(load, name)
    pricing, leaders, _ = priced_plan(captured, cluster, plan, workload=load)
    node = next(leader for b, o, leader in deciding_ops(load) if (b, o) == (block, op))
    group = load.cluster_of(node)
    kind = next(b for b in plan.blocks if b.name == block)
    placement = _placement(plan, block, op)
    time = sum((pricing.op(member, group.assignment(member, leaders[group.index])) for member in group.members), ZERO)
    predicted = predict_plan(captured, cluster, plan, workload=load)
    alternatives: list[Alternative] = []
    forbidden = [Forbidden(pattern=f"{block}/{op}", placement=placement)]
    constraints = constraints_like(plan)
    while len(alternatives) < count:
        progress(f"what if not {', '.join(str(one).rpartition(': ')[2] for one in forbidden)}")
        try:
            own = replace(constraints, forbidden=tuple(forbidden_like(plan, one) for one in forbidden))
            found = search_captured(captured, cluster, own, workload=load).plan
        except InfeasiblePlan as error:
            alternatives.append(Alternative(placement=(), plan=None, reason=str(error)))
            break
        found = with_axes_of(found, plan)
        other = _placement(found, block, op)
        alternatives.append(
            Alternative(placement=other, plan=found, better_at=_better_at(captured, cluster, plan, found, load))
        )
        forbidden.append(Forbidden(pattern=f"{block}/{op}", placement=other))
    members = set(group.members)
    return Explanation(
        block=block,
        op=op,
        repeats=kind.repeats,
        placement=placement,
        followers=tuple(load.folding.key.get(member, member.name) for member in group.members[1:]),
        factors=tuple(choice for choice in group.choices if choice is not None),
        time=time,
        communications=tuple(own for around, own in communications(pricing, leaders) if around & members),
        step_time_s=predicted.step_time_s,
        peak_share=predicted.peak_bytes / (cluster.device.usable_bytes * constraints.memory_fraction),
        alternatives=tuple(alternatives),
    )


def _placement(plan: Plan, block: str, op: str) -> tuple[tuple[str, str | None], ...]:
    axes = next(own for own in plan.blocks if own.name == block).ops.get(op, {})
    return tuple((axis, axes.get(axis)) for axis, size in plan.mesh.items() if size > 1)


def _better_at(captured: CapturedModel, cluster: Cluster, plan: Plan, other: Plan, load: Workload) -> float | None:
    """The first of the speeds of the network at which ``other`` would be faster than ``plan``."""
    for speed in _SPEEDS:
        links = {name: getattr(cluster, name).slower(1 / speed) for name in ("intra_node", "inter_node")}
        now, then = (
            predict_plan(captured, replace(cluster, **links), each, workload=load).step_time_s for each in (plan, other)
        )
        if then < now:
            return speed
    return None
