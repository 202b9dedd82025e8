"""Dead-end elimination: labels that no best labelling needs (Goldstein, Biophysical Journal 66, 1994).

Label ``o`` of a variable is removed if another label ``p`` of it is no worse whatever labels the other variables take:

    cost[o] - cost[p]  +  sum over factors at the variable of  min (factor with o - factor with p)  >=  0

The minimum over the labels of the other variables is bounded factor by factor:

- the variable produces the factor: each of its users needs one state, so the difference is at least the sum over
  users of the smallest difference they can select (and with no negative difference anywhere, at least the
  largest of these minima).
- the variable uses the factor: against the states the producer may leave it in; where the factor has other users a
  state may be needed anyway, so dropping it saves nothing for sure, while needing a new one costs at most its
  price.
- the variable does both: label ``o`` is charged at least its own needs, ``p`` at most its own and the dearest of
  all other users.

Removal is repeated until nothing changes. Of two labels that are equal in all respects the first stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.search.assign.instance import Factor, Floats, Instance, Ints, absorb, restrict

NDArrayBool = NDArray[np.bool_]


def reduce(instance: Instance) -> tuple[Instance, list[Ints]]:
    """An instance with the same optimum and fewer labels, and for each variable the labels that are left."""
    instance = absorb(instance)
    kept: list[Ints] = [np.arange(n) for n in instance.num_labels]
    # Labels of several variables may go at once: each is beaten whatever the others take, removed labels included.
    # A variable is looked at again once a variable it shares a factor with has lost labels.
    waiting = set(range(len(instance.costs)))
    while waiting:
        keep = [np.arange(n) for n in instance.num_labels]
        smaller = []
        for variable in sorted(waiting):
            if len(instance.costs[variable]) > 1:
                alive = _alive(instance, variable)
                if not alive.all():
                    smaller.append(variable)
                    keep[variable] = np.flatnonzero(alive)
                    kept[variable] = kept[variable][alive]
        waiting = set().union(*(_neighbours(instance, variable) for variable in smaller))
        if smaller:
            instance = absorb(restrict(instance, keep))
    return instance, kept


def _neighbours(instance: Instance, variable: int) -> set[int]:
    found: set[int] = set()
    for factor in instance.factors:
        variables = {factor.producer, *(user.variable for user in factor.users)}
        if variable in variables:
            found |= variables
    return found


def _alive(instance: Instance, variable: int) -> NDArrayBool:
    """Which labels of ``variable`` survive against all others."""
    cost = instance.costs[variable]
    bound = cost[:, None] - cost[None, :]  # [o, p]: at least how much worse o is than p
    for factor in instance.factors:
        uses = [user for user in factor.users if user.variable == variable]
        if factor.producer == variable:
            bound = bound + (_both(factor, variable) if uses else _producing(factor, instance))
        elif uses:
            bound = bound + _using(factor, variable, instance)
    # A numerical tie may only be broken one way round, or two equal labels would remove each other.
    scale = 1e-12 * (1.0 + float(np.abs(cost).max()))
    worse = bound > scale
    tie = (bound >= -scale) & ~worse
    beaten = worse | np.tril(tie, -1)
    alive = np.ones(len(cost), dtype=bool)
    for label in np.flatnonzero(beaten.any(axis=1)).tolist():
        alive[label] = not (beaten[label] & alive).any()
    return alive


def _producing(factor: Factor, instance: Instance) -> Floats:
    difference = factor.cost[factor.sources][:, None, :] - factor.cost[factor.sources][None, :, :]  # [o, p, q]
    total = np.zeros(difference.shape[:2])
    largest = np.full(difference.shape[:2], -np.inf)
    for user in factor.users:
        smallest = difference[:, :, np.unique(user.needs)].min(axis=2)
        total += np.minimum(smallest, 0.0)
        largest = np.maximum(largest, smallest)
    never_cheaper = difference.min(axis=2) >= 0.0
    return np.where(never_cheaper, np.maximum(largest, 0.0), total)


def _using(factor: Factor, variable: int, instance: Instance) -> Floats:
    states = np.unique(factor.sources)
    own = [user.needs for user in factor.users if user.variable == variable]
    alone = len(own) == len(factor.users)
    count = len(own[0])
    if len(own) == 1:
        single = factor.cost[states][:, own[0]]
        if alone:
            return np.asarray((single[:, :, None] - single[:, None, :]).min(axis=0))
        return np.where(own[0][:, None] == own[0][None, :], 0.0, -single.max(axis=0)[None, :])
    priced = np.zeros((len(states), count))
    for label in range(count):
        needed = sorted({int(needs[label]) for needs in own})
        priced[:, label] = factor.cost[states][:, needed].sum(axis=1)
    if alone:
        return np.asarray((priced[:, :, None] - priced[:, None, :]).min(axis=0))
    bound = np.empty((count, count))
    for label in range(count):
        have = {int(needs[label]) for needs in own}
        for other in range(count):
            extra = sorted({int(needs[other]) for needs in own} - have)
            bound[label, other] = -factor.cost[states][:, extra].sum(axis=1).max() if extra else 0.0
    return bound


def _both(factor: Factor, variable: int) -> Floats:
    """Producer and user at once: bounded below by paying nothing with ``o`` and everything with ``p``."""
    own = [user.needs for user in factor.users if user.variable == variable]
    others = [user for user in factor.users if user.variable != variable]
    count = len(factor.sources)
    forced = np.zeros(count)
    worst = np.zeros(count)
    for label in range(count):
        row = factor.cost[factor.sources[label]]
        mine = sorted({int(needs[label]) for needs in own})
        forced[label] = row[mine].sum()
        worst[label] = forced[label] + sum(float(row[user.needs].max()) for user in others)
    bound = forced[:, None] - worst[None, :]
    same = (factor.sources[:, None] == factor.sources[None, :]) & np.logical_and.reduce(
        [needs[:, None] == needs[None, :] for needs in own]
    )
    return np.where(same, 0.0, bound)
