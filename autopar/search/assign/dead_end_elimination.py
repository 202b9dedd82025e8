"""Options that no best selection needs.

Option ``o`` of a unit goes if another option ``p`` of it is no worse whatever the other units take:

    cost[o] - cost[p]  +  sum over flows at the unit of  min (flow with o - flow with p)  >=  0

(dead-end elimination, Goldstein, Biophysical Journal 66, 1994). The minimum over what the other units may do
is bounded flow by flow:

- the unit produces the flow: each of its users needs one state, so the difference is at least the sum over
  users of the smallest difference they can select (and with no negative difference anywhere, at least the
  largest of these minima).
- the unit uses the flow: against the states the producer may leave it in; where the flow has other users a
  state may be needed anyway, so dropping it saves nothing for sure, while needing a new one costs at most its
  price.
- the unit does both: only kept if the difference is bounded below for every state of the users.

Removal is repeated until nothing changes. Of two options that are equal in all respects the first one stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.search.assign.instance import Floats, Flow, Instance, Ints, absorb, restrict

NDArrayBool = NDArray[np.bool_]


def reduce(instance: Instance) -> tuple[Instance, list[Ints]]:
    """An instance with the same optimum and fewer options, and for each unit the options it kept."""
    instance = absorb(instance)
    kept: list[Ints] = [np.arange(n) for n in instance.num_options]
    # Options of several units may go at once: each is beaten whatever the others take, removed options included.
    # A unit is looked at again once a unit it shares a flow with has lost options.
    waiting = set(range(len(instance.costs)))
    while waiting:
        keep = [np.arange(n) for n in instance.num_options]
        smaller = []
        for unit in sorted(waiting):
            if len(instance.costs[unit]) > 1:
                alive = _alive(instance, unit)
                if not alive.all():
                    smaller.append(unit)
                    keep[unit] = np.flatnonzero(alive)
                    kept[unit] = kept[unit][alive]
        waiting = set().union(*(_neighbours(instance, unit) for unit in smaller))
        if smaller:
            instance = absorb(restrict(instance, keep))
    return instance, kept


def _neighbours(instance: Instance, unit: int) -> set[int]:
    found: set[int] = set()
    for flow in instance.flows:
        units = {flow.producer, *(user.unit for user in flow.users)}
        if unit in units:
            found |= units
    return found


def _alive(instance: Instance, unit: int) -> NDArrayBool:
    """Which options of ``unit`` survive against all others."""
    cost = instance.costs[unit]
    bound = cost[:, None] - cost[None, :]  # [o, p]: at least how much worse o is than p
    for flow in instance.flows:
        uses = [user for user in flow.users if user.unit == unit]
        if flow.producer == unit:
            bound = bound + (_both(flow, unit) if uses else _producing(flow, instance))
        elif uses:
            bound = bound + _using(flow, unit, instance)
    # A numerical tie may only be broken one way round, or two equal options would remove each other.
    scale = 1e-12 * (1.0 + float(np.abs(cost).max()))
    worse = bound > scale
    tie = (bound >= -scale) & ~worse
    beaten = worse | np.tril(tie, -1)
    alive = np.ones(len(cost), dtype=bool)
    for option in np.flatnonzero(beaten.any(axis=1)).tolist():
        alive[option] = not (beaten[option] & alive).any()
    return alive


def _producing(flow: Flow, instance: Instance) -> Floats:
    difference = flow.cost[flow.sources][:, None, :] - flow.cost[flow.sources][None, :, :]  # [o, p, q]
    total = np.zeros(difference.shape[:2])
    largest = np.full(difference.shape[:2], -np.inf)
    for user in flow.users:
        smallest = difference[:, :, np.unique(user.needs)].min(axis=2)
        total += np.minimum(smallest, 0.0)
        largest = np.maximum(largest, smallest)
    never_cheaper = difference.min(axis=2) >= 0.0
    return np.where(never_cheaper, np.maximum(largest, 0.0), total)


def _using(flow: Flow, unit: int, instance: Instance) -> Floats:
    states = np.unique(flow.sources)
    own = [user.needs for user in flow.users if user.unit == unit]
    alone = len(own) == len(flow.users)
    count = len(own[0])
    if len(own) == 1:
        single = flow.cost[states][:, own[0]]
        if alone:
            return np.asarray((single[:, :, None] - single[:, None, :]).min(axis=0))
        return np.where(own[0][:, None] == own[0][None, :], 0.0, -single.max(axis=0)[None, :])
    priced = np.zeros((len(states), count))
    for option in range(count):
        needed = sorted({int(needs[option]) for needs in own})
        priced[:, option] = flow.cost[states][:, needed].sum(axis=1)
    if alone:
        return np.asarray((priced[:, :, None] - priced[:, None, :]).min(axis=0))
    bound = np.empty((count, count))
    for option in range(count):
        have = {int(needs[option]) for needs in own}
        for other in range(count):
            extra = sorted({int(needs[other]) for needs in own} - have)
            bound[option, other] = -flow.cost[states][:, extra].sum(axis=1).max() if extra else 0.0
    return bound


def _both(flow: Flow, unit: int) -> Floats:
    """Producer and user at once: bounded below by paying nothing with ``o`` and everything with ``p``."""
    own = [user.needs for user in flow.users if user.unit == unit]
    others = [user for user in flow.users if user.unit != unit]
    count = len(flow.sources)
    forced = np.zeros(count)
    worst = np.zeros(count)
    for option in range(count):
        row = flow.cost[flow.sources[option]]
        mine = sorted({int(needs[option]) for needs in own})
        forced[option] = row[mine].sum()
        worst[option] = forced[option] + sum(float(row[user.needs].max()) for user in others)
    bound = forced[:, None] - worst[None, :]
    same = (flow.sources[:, None] == flow.sources[None, :]) & np.logical_and.reduce(
        [needs[:, None] == needs[None, :] for needs in own]
    )
    return np.where(same, 0.0, bound)
