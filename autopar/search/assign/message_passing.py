"""Labels that no best labelling has, by lower bounds from message passing.

The objective is a sum of unaries, theta_v over the labels of each variable, and of factors phi_f. A variable may lend
part of its costs to a factor,

    theta_v[o] -= d[s],   phi_f[.., s, ..] += d[s]        s: the state that label o gives the factor

which leaves the cost of every labelling as it is, and changes

    bound  =  sum_v min theta_v  +  sum_f min phi_f       at most the cost of every labelling

The variables are visited in their order and back. Each receives a message from each of its factors, the least cost of
the factor in every state, and lends equal parts of its unaries to the factors that lead on (sequential tree-reweighted
message passing: Kolmogorov, TPAMI 28, 2006; with factors of several users: TPAMI 37, 2015). When variable v has
received its messages, its factors cost nothing in the best case, so bound + theta_v[o] - min theta_v is a lower bound
on the cost of all labellings that have label o: its *min-marginal*. Labels whose min-marginal exceeds the cost of some
labelling are removed.

The least cost of a factor in each of its states is exact: which users need one state together is a partition of the
users, and within a partition the states are independent. No cost is negative, so a partition that counts a state
twice is never the least. Where a factor has many users, groups of them each bear an equal part of its costs.

On a chain one pass is exact, and ops are a chain with a few parallel paths: mostly a handful of passes leaves so few
labels that elimination is easy, or meets a labelling whose cost is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from autopar.search.assign.bucket_elimination import eliminate
from autopar.search.assign.instance import Factor, Floats, Instance, Ints, absorb, restrict, value

# Constants here change how long an exact answer takes and not the answer. Halved or doubled, each alone, CPU time of a
# search of Llama 3 8B on 64 and Mixtral 8x7B on 32 devices stays within 14 % (docs/decisions/0021), and all were
# chosen.

# Users of a factor that are partitioned, at most: there are 15 partitions of four.
_TOGETHER = 4

# Passes back and forth, at most. They end when one leaves more than such a part of the gap between bound and price.
_MAX_PASSES = 50
_SLOW = 0.98

# Labels left for each variable, on average, with which elimination is tried, and the size of its tables.
_FEW = 6
_EASY_ENTRIES = 30_000

# Labels of each variable among which a labelling is looked for in every second pass.
_NARROW = 3

# Rounding of the bounds, as a part of the costs of the best labelling met. Sums of some 10⁴ doubles, each rounded to
# 1.1e-16 of itself, are off by 1e-12 at most.
_ROUNDING = 1e-11


def prune(instance: Instance) -> list[Ints]:
    """Labels of each variable that a best labelling may have; one each if a labelling was met whose cost is the bound.

    At least one best labelling is among them. Deterministic.
    """
    return _Messages(instance).run()


@dataclass(slots=True, eq=False)
class _Slot:
    """One place of a factor, as producer or user, that ``variable`` fills.

    used: states that labels of the variable give it. of: for each label its place in ``used``. order, starts: labels by
    state. lent: costs that the variable has lent the factor in each state, infinite in states that no label gives.
    """

    variable: int
    used: Ints
    of: Ints
    order: Ints
    starts: Ints
    lent: Floats

    @staticmethod
    def made(variable: int, states: Ints, count: int) -> _Slot:
        order = np.argsort(states, kind="stable")
        ordered = states[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        used = ordered[starts]
        place = np.zeros(count, dtype=np.int64)
        place[used] = np.arange(len(used))
        lent = np.full(count, np.inf)
        lent[used] = 0.0
        return _Slot(variable, used, place[states], order, starts, lent)

    def alone(self, label: int) -> Floats:
        """Lent costs if the variable has decided for ``label``: infinite in all other states."""
        lent = np.full(len(self.lent), np.inf)
        lent[self.used[self.of[label]]] = 0.0
        return lent

    def least(self, costs: Floats) -> Floats:
        """Minimum of ``costs`` over the labels that give each used state."""
        return np.minimum.reduceat(costs[self.order], self.starts)


@dataclass(slots=True, eq=False)
class _Term:
    """A factor, or the share of its costs that some of its users bear.

    cost: [source state, needed state]; turned: its transpose. slots: producer, then users.
    """

    cost: Floats
    turned: Floats
    slots: list[_Slot]

    @staticmethod
    def made(factor: Factor) -> list[_Term]:
        groups = [factor.users[first : first + _TOGETHER] for first in range(0, len(factor.users), _TOGETHER)]
        cost = factor.cost / len(groups) if len(groups) > 1 else factor.cost
        turned = np.ascontiguousarray(cost.T)
        terms = []
        for users in groups:
            slots = [_Slot.made(factor.producer, factor.sources, cost.shape[0])]
            slots += [_Slot.made(user.variable, user.needs, cost.shape[1]) for user in users]
            terms.append(_Term(cost, turned, slots))
        return terms

    def least(self, place: int, lent: Sequence[Floats]) -> Floats:
        """Least cost of the factor for each used state of slot ``place``, with the costs that every slot has lent."""
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

    unaries: of each variable, their least is 0. bound: the costs taken out of all unaries and factors, none of which is
    negative then. min_marginals: lower bounds on the cost of all labellings that have a label. at: slots of each
    variable. onward: slots whose factor has a later variable, and slots whose factor has an earlier one. labelling: the
    best that was met, of cost ``best``.
    """

    instance: Instance
    unaries: list[Floats] = field(init=False)
    min_marginals: list[Floats] = field(init=False)
    bound: float = 0.0
    at: list[list[tuple[_Term, int]]] = field(init=False)
    onward: tuple[list[list[_Slot]], list[list[_Slot]]] = field(init=False)
    best: float = np.inf
    labelling: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        variables = range(len(self.instance.costs))
        self.unaries = [cost.copy() for cost in self.instance.costs]
        self.min_marginals = [np.full(len(cost), -np.inf) for cost in self.instance.costs]
        self.at = [[] for _ in variables]
        self.onward = ([[] for _ in variables], [[] for _ in variables])
        for factor in self.instance.factors:
            for term in _Term.made(factor):
                ends = [slot.variable for slot in term.slots]
                for place, slot in enumerate(term.slots):
                    self.at[slot.variable].append((term, place))
                    if slot.variable < max(ends):
                        self.onward[0][slot.variable].append(slot)
                    if slot.variable > min(ends):
                        self.onward[1][slot.variable].append(slot)

    def run(self) -> list[Ints]:
        for number in range(_MAX_PASSES):
            gap = self.best - self.bound
            for step in self._steps(number):
                step()
                if self.labelling and self.best - self.bound <= self._rounding():
                    return [np.array([label]) for label in self.labelling]
            kept = self._kept()
            if sum(len(keep) for keep in kept) <= _FEW * len(kept) and self._meet_best_of(kept):
                return [np.array([label]) for label in self.labelling]
            if self.best - self.bound > _SLOW * gap:
                break
        return kept

    def _rounding(self) -> float:
        """How far bounds may be off by rounding."""
        chosen = zip(self.instance.costs, self.labelling, strict=True)
        return _ROUNDING * (abs(self.best) + sum(abs(float(cost[label])) for cost, label in chosen))

    def _kept(self) -> list[Ints]:
        limit = self.best + self._rounding()
        kept = []
        for min_marginals, label in zip(self.min_marginals, self.labelling, strict=True):
            keep = min_marginals <= limit
            keep[label] = True
            kept.append(np.flatnonzero(keep))
        return kept

    def _steps(self, number: int) -> Iterator[Callable[[], None]]:
        """A pass over the variables, the cheap steps first."""
        yield partial(self._sweep, backward=False)
        yield lambda: self._meet([int(min_marginals.argmin()) for min_marginals in self.min_marginals])
        yield partial(self._sweep, backward=True)
        if number % 2 == 0:
            yield self._look_near

    def _sweep(self, backward: bool) -> None:
        """Visit every variable. On the way back a labelling is made: for each variable the best label given those
        before."""
        variables = range(len(self.unaries))
        labelling: dict[int, int] = {}
        for variable in reversed(variables) if backward else variables:
            unaries = self.unaries[variable]
            for term, place in self.at[variable]:
                slot = term.slots[place]
                message = term.least(place, [slot.lent for slot in term.slots])
                slot.lent[slot.used] -= message
                unaries += message[slot.of]
            least = unaries.min()
            self.bound += float(least)
            unaries -= least
            np.maximum(self.min_marginals[variable], self.bound + unaries, out=self.min_marginals[variable])
            if backward:
                labelling[variable] = int(self._after(variable, labelling).argmin())
            onward = self.onward[backward][variable]
            if onward:
                share = 1.0 / max(len(slots[variable]) for slots in self.onward)
                parts = [share * slot.least(unaries) for slot in onward]
                for slot, part in zip(onward, parts, strict=True):
                    slot.lent[slot.used] += part
                    unaries -= part[slot.of]
        if backward:
            self._meet([labelling[variable] for variable in variables])

    def _after(self, variable: int, labelling: dict[int, int]) -> Floats:
        """Cost of each label of a variable above the bound, given the labels of variables that have decided."""
        costs = self.unaries[variable]
        for term, place in self.at[variable]:
            slots = term.slots
            if any(slot.variable in labelling for slot in slots):
                lent = [
                    slot.alone(labelling[slot.variable]) if slot.variable in labelling else slot.lent for slot in slots
                ]
                costs = costs + term.least(place, lent)[slots[place].of]
        return costs

    def _look_near(self) -> None:
        """Meet the best labelling among the labels with the least min-marginals and those of the best one met."""
        self._meet_best_of(
            [
                np.union1d(np.argsort(min_marginals, kind="stable")[:_NARROW], [label])
                for min_marginals, label in zip(self.min_marginals, self.labelling, strict=True)
            ]
        )

    def _meet_best_of(self, kept: list[Ints]) -> bool:
        """Meet the best labelling of ``kept`` by elimination; whether its tables were small enough."""
        found = eliminate(absorb(restrict(self.instance, kept)), _EASY_ENTRIES)
        if found is not None:
            self._meet([int(keep[label]) for keep, label in zip(kept, found, strict=True)])
        return found is not None

    def _meet(self, labelling: list[int]) -> None:
        """Record a labelling if it is the best so far."""
        price = value(self.instance, labelling)
        if price < self.best:
            self.best, self.labelling = price, labelling
