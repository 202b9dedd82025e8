"""Options that no best selection has, by lower bounds from message passing.

The objective is a sum of terms over units, theta_u, and over flows, phi_f. A unit may lend part of its costs to a flow,

    theta_u[o] -= d[s],   phi_f[.., s, ..] += d[s]        s: the state that option o gives the flow

which leaves every selection at its price, and changes

    bound  =  sum_u min theta_u  +  sum_f min phi_f       at most the price of every selection

The units are visited in their order and back. Each takes from its flows what their best cost is in every state, and
lends equal parts of what it then has to the flows that lead on (sequential tree-reweighted message passing:
Kolmogorov, TPAMI 28, 2006; with flows of several users: TPAMI 37, 2015). When unit u has taken, its flows cost
nothing in the best case, so theta_u[o] above its least is what option o costs more than the bound: a floor of all
selections that have it. Options whose floor is above the price of some selection go.

The least a flow costs with each of its states is exact: which users need one state together is a partition of the
users, and within a partition the states are independent. No price is negative, so a partition that counts a state
twice is never the least. Where a flow has many users, groups of them each bear an equal part of its prices.

On a chain one pass is exact, and ops are a chain with a few parallel paths: mostly a handful of passes leaves so few
options that elimination is easy, or meets a selection whose price is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from autopar.search.assign.bucket_elimination import eliminate
from autopar.search.assign.instance import Floats, Flow, Instance, Ints, absorb, restrict, value

# Constants here change how long an exact answer takes and not the answer. Halved or doubled, each alone, CPU time of a
# search of Llama 3 8B on 64 and Mixtral 8x7B on 32 devices stays within 14 % (docs/decisions/0021), and all were
# chosen.

# Users of a flow that are partitioned, at most: there are 15 partitions of four.
_TOGETHER = 4

# Passes back and forth, at most. They end when one leaves more than such a part of the gap between bound and price.
_MAX_PASSES = 50
_SLOW = 0.98

# Options left for each unit, on average, with which elimination is tried, and the size of its tables.
_FEW = 6
_EASY_ENTRIES = 30_000

# Options of each unit among which a selection is looked for in every second pass.
_NARROW = 3

# Rounding of the bounds, as a part of the costs of the best selection met. Sums of some 10⁴ doubles, each rounded to
# 1.1e-16 of itself, are off by 1e-12 at most.
_ROUNDING = 1e-11


def prune(instance: Instance) -> list[Ints]:
    """Options of each unit, a best selection among them: one each if a selection was met whose price is the bound.

    Deterministic.
    """
    return _Messages(instance).run()


@dataclass(slots=True, eq=False)
class _Slot:
    """One place of a flow, as producer or user, that ``unit`` fills.

    used: states that options of the unit give it; of: for each option its place in ``used``. order, starts: options by
    state. lent: what the unit has lent the flow in each state, infinite where no option leads.
    """

    unit: int
    used: Ints
    of: Ints
    order: Ints
    starts: Ints
    lent: Floats

    @staticmethod
    def made(unit: int, states: Ints, count: int) -> _Slot:
        order = np.argsort(states, kind="stable")
        ordered = states[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        used = ordered[starts]
        place = np.zeros(count, dtype=np.int64)
        place[used] = np.arange(len(used))
        lent = np.full(count, np.inf)
        lent[used] = 0.0
        return _Slot(unit, used, place[states], order, starts, lent)

    def alone(self, option: int) -> Floats:
        """What is lent if the unit has decided for an option."""
        lent = np.full(len(self.lent), np.inf)
        lent[self.used[self.of[option]]] = 0.0
        return lent

    def least(self, costs: Floats) -> Floats:
        """The least over the options of each used state."""
        return np.minimum.reduceat(costs[self.order], self.starts)


@dataclass(slots=True, eq=False)
class _Factor:
    """A flow, or the part of its prices that some of its users bear.

    cost: [source state, needed state]; turned: the same transposed. slots: producer, then users.
    """

    cost: Floats
    turned: Floats
    slots: list[_Slot]

    @staticmethod
    def made(flow: Flow) -> list[_Factor]:
        groups = [flow.users[first : first + _TOGETHER] for first in range(0, len(flow.users), _TOGETHER)]
        cost = flow.cost / len(groups) if len(groups) > 1 else flow.cost
        turned = np.ascontiguousarray(cost.T)
        factors = []
        for users in groups:
            slots = [_Slot.made(flow.producer, flow.sources, cost.shape[0])]
            slots += [_Slot.made(user.unit, user.needs, cost.shape[1]) for user in users]
            factors.append(_Factor(cost, turned, slots))
        return factors

    def least(self, place: int, lent: Sequence[Floats]) -> Floats:
        """The least that the flow costs, with what each slot lent, for each used state of a slot."""
        own, (producer, *users) = self.slots[place], lent
        if len(users) == 1:
            costs, other = (self.turned, producer) if place else (self.cost, users[0])
            return np.asarray(((costs + other).min(axis=1) + lent[place])[own.used])
        together, best = self._by_group(place, users)
        if not place:
            return np.asarray((best[-1] + producer)[own.used])
        # Those who need the same state as this user, and the best for the rest.
        me = 1 << (place - 1)
        found = np.full(self.cost.shape[1], np.inf)
        for group in range(me, len(together)):
            if group & me:
                rest = producer + best[(len(best) - 1) ^ group]
                found = np.minimum(found, (self.turned + rest).min(axis=1) + together[group])
        return np.asarray(found[own.used])

    def _by_group(self, place: int, users: Sequence[Floats]) -> tuple[list[Floats], list[Floats]]:
        """For each set of users, as bits: what they lent together, over needed states; the least that they cost, over
        source states. Slot ``place`` will not ask for the latter where it is a member."""
        num_sources, num_needs = self.cost.shape
        me = 1 << (place - 1) if place else 0
        together: list[Floats] = [np.zeros(num_needs)]
        alone: list[Floats] = [np.zeros(num_sources)]  # if they need one state
        best: list[Floats] = [np.zeros(num_sources)]
        for group in range(1, 1 << len(users)):
            last = 1 << (group.bit_length() - 1)
            together.append(together[group ^ last] + users[group.bit_length() - 1])
            if group & me:
                alone.append(alone[0])
                best.append(best[0])
                continue
            least = (self.cost + together[group]).min(axis=1)
            alone.append(least)
            # The last user with each subset of the others.
            part = others = group ^ last
            while part:
                least = np.minimum(least, alone[group ^ part] + best[part])
                part = (part - 1) & others
            best.append(least)
        return together, best


@dataclass(slots=True, eq=False)
class _Messages:
    """Message passing over one instance.

    theta: of each unit, its least is 0. bound: what was taken out of all terms, none of which is negative then.
    floors: the least cost of all selections that have an option, as far as it is known. at: slots of each unit. onward:
    those whose flow has a later unit, and those whose flow has an earlier one. selection: the best one met.
    """

    instance: Instance
    theta: list[Floats] = field(init=False)
    floors: list[Floats] = field(init=False)
    bound: float = 0.0
    at: list[list[tuple[_Factor, int]]] = field(init=False)
    onward: tuple[list[list[_Slot]], list[list[_Slot]]] = field(init=False)
    best: float = np.inf
    selection: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        units = range(len(self.instance.costs))
        self.theta = [cost.copy() for cost in self.instance.costs]
        self.floors = [np.full(len(cost), -np.inf) for cost in self.instance.costs]
        self.at = [[] for _ in units]
        self.onward = ([[] for _ in units], [[] for _ in units])
        for flow in self.instance.flows:
            for factor in _Factor.made(flow):
                ends = [slot.unit for slot in factor.slots]
                for place, slot in enumerate(factor.slots):
                    self.at[slot.unit].append((factor, place))
                    if slot.unit < max(ends):
                        self.onward[0][slot.unit].append(slot)
                    if slot.unit > min(ends):
                        self.onward[1][slot.unit].append(slot)

    def run(self) -> list[Ints]:
        for number in range(_MAX_PASSES):
            gap = self.best - self.bound
            for step in self._steps(number):
                step()
                if self.selection and self.best - self.bound <= self._rounding():
                    return [np.array([option]) for option in self.selection]
            kept = self._kept()
            if sum(len(keep) for keep in kept) <= _FEW * len(kept) and self._meet_best_of(kept):
                return [np.array([option]) for option in self.selection]
            if self.best - self.bound > _SLOW * gap:
                break
        return kept

    def _rounding(self) -> float:
        """How much bounds may be off."""
        chosen = zip(self.instance.costs, self.selection, strict=True)
        return _ROUNDING * (abs(self.best) + sum(abs(float(cost[option])) for cost, option in chosen))

    def _kept(self) -> list[Ints]:
        limit = self.best + self._rounding()
        kept = []
        for floors, option in zip(self.floors, self.selection, strict=True):
            keep = floors <= limit
            keep[option] = True
            kept.append(np.flatnonzero(keep))
        return kept

    def _steps(self, number: int) -> Iterator[Callable[[], None]]:
        """A pass over the units, with what is cheap first."""
        yield partial(self._sweep, backward=False)
        yield lambda: self._meet([int(floors.argmin()) for floors in self.floors])
        yield partial(self._sweep, backward=True)
        if number % 2 == 0:
            yield self._look_near

    def _sweep(self, backward: bool) -> None:
        """Visit every unit. On the way back a selection is made: the best option of each after those before."""
        units = range(len(self.theta))
        selection: dict[int, int] = {}
        for unit in reversed(units) if backward else units:
            theta = self.theta[unit]
            for factor, place in self.at[unit]:
                slot = factor.slots[place]
                taken = factor.least(place, [slot.lent for slot in factor.slots])
                slot.lent[slot.used] -= taken
                theta += taken[slot.of]
            least = theta.min()
            self.bound += float(least)
            theta -= least
            np.maximum(self.floors[unit], self.bound + theta, out=self.floors[unit])
            if backward:
                selection[unit] = int(self._after(unit, selection).argmin())
            onward = self.onward[backward][unit]
            if onward:
                share = 1.0 / max(len(slots[unit]) for slots in self.onward)
                parts = [share * slot.least(theta) for slot in onward]
                for slot, part in zip(onward, parts, strict=True):
                    slot.lent[slot.used] += part
                    theta -= part[slot.of]
        if backward:
            self._meet([selection[unit] for unit in units])

    def _after(self, unit: int, selection: dict[int, int]) -> Floats:
        """What each option of a unit costs more than the bound, after some units have decided."""
        costs = self.theta[unit]
        for factor, place in self.at[unit]:
            slots = factor.slots
            if any(slot.unit in selection for slot in slots):
                lent = [slot.alone(selection[slot.unit]) if slot.unit in selection else slot.lent for slot in slots]
                costs = costs + factor.least(place, lent)[slots[place].of]
        return costs

    def _look_near(self) -> None:
        """The best selection among the options with the least floors and those of the best one met."""
        self._meet_best_of(
            [
                np.union1d(np.argsort(floors, kind="stable")[:_NARROW], [option])
                for floors, option in zip(self.floors, self.selection, strict=True)
            ]
        )

    def _meet_best_of(self, kept: list[Ints]) -> bool:
        """Whether that was easy."""
        found = eliminate(absorb(restrict(self.instance, kept)), _EASY_ENTRIES)
        if found is not None:
            self._meet([int(keep[option]) for keep, option in zip(kept, found, strict=True)])
        return found is not None

    def _meet(self, selection: list[int]) -> None:
        price = value(self.instance, selection)
        if price < self.best:
            self.best, self.selection = price, selection
