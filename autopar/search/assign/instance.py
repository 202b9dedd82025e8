"""The inner problem in the abstract: a labelling of a factor graph of least cost.

An instance has *variables* (clusters of ops), each of which takes one of its *labels* (a joint choice over the
mesh axes), and *factors* (tensors). The label of a factor's producer decides the state the tensor is produced in,
the label of each user the state it needs; the tensor is converted once into every state that some user
needs. A *labelling* takes a label for each variable. It costs

    sum_v cost_v[o_v]  +  sum_f  sum_{q in needed}  cost_f[s, q]      s = source_f[o_producer],
                                                                      needed = {need_k[o_k] : users k}

Nothing here knows about tensors or meshes, so that solvers can be compared on random instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class User:
    """One use of a factor: ``needs[o]`` is the state that label ``o`` of ``variable`` needs the tensor in."""

    variable: int
    needs: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factor:
    """One tensor: ``sources[o]`` is the state in which label ``o`` of ``producer`` leaves it.

    cost: price of each (source state, needed state), all repeats of the tensor together; not negative.
    """

    producer: int
    sources: Ints
    users: tuple[User, ...]
    cost: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """A factor graph.

    costs: for each variable the cost of each of its labels. factors: costs that labels of several variables have
    together.
    """

    costs: tuple[Floats, ...]
    factors: tuple[Factor, ...]

    @property
    def num_labels(self) -> tuple[int, ...]:
        """Number of labels of each variable."""
        return tuple(len(cost) for cost in self.costs)


def value(instance: Instance, labelling: Sequence[int]) -> float:
    """Cost of a labelling, which gives variable ``v`` its label ``labelling[v]``."""
    total = float(sum(cost[label] for cost, label in zip(instance.costs, labelling, strict=True)))
    for factor in instance.factors:
        state = factor.sources[labelling[factor.producer]]
        needed = {int(user.needs[labelling[user.variable]]) for user in factor.users}
        total += float(sum(factor.cost[state, need] for need in needed))
    return total


def brute_force(instance: Instance) -> tuple[float, tuple[int, ...]]:
    """Least cost and a labelling that has it, by trying all of them; exponential, for tests."""
    return min((value(instance, s), s) for s in product(*(range(n) for n in instance.num_labels)))


def restrict(instance: Instance, kept: Sequence[Ints]) -> Instance:
    """The instance with the labels ``kept[v]`` of each variable alone; states that no label uses any more are
    dropped."""
    costs = tuple(cost[keep] for cost, keep in zip(instance.costs, kept, strict=True))
    smaller = {variable for variable, keep in enumerate(kept) if len(keep) < len(instance.costs[variable])}
    factors = []
    for factor in instance.factors:
        if factor.producer not in smaller and not any(user.variable in smaller for user in factor.users):
            factors.append(factor)
            continue
        sources, from_source = np.unique(factor.sources[kept[factor.producer]], return_inverse=True)
        needs = [user.needs[kept[user.variable]] for user in factor.users]
        used = np.unique(np.concatenate(needs))
        users = tuple(
            User(variable=user.variable, needs=np.searchsorted(used, need))
            for user, need in zip(factor.users, needs, strict=True)
        )
        factors.append(
            Factor(
                producer=factor.producer,
                sources=from_source.reshape(-1),
                users=users,
                cost=factor.cost[np.ix_(sources, used)],
            )
        )
    return Instance(costs=costs, factors=tuple(factors))


def absorb(instance: Instance) -> Instance:
    """An instance with the same costs and fewer factors: costs that one variable alone decides become costs of its
    labels.

    Users of one variable with equal needs are merged, factors that cost nothing dropped, and factors whose producer and
    users are one variable added to the costs of that variable. Variables with a single label count as decided.
    """
    costs = [cost.copy() for cost in instance.costs]
    factors: dict[tuple[object, ...], Factor] = {}
    for factor in instance.factors:
        if not factor.cost.any():
            continue
        distinct = {(user.variable, user.needs.tobytes()): user for user in factor.users}
        deciding = {factor.producer, *(variable for variable, _ in distinct)}
        open_variables = {variable for variable in deciding if len(costs[variable]) > 1}
        if len(open_variables) <= 1:
            variable = next(iter(open_variables), factor.producer)
            for label in range(len(costs[variable])):
                state = factor.sources[label if factor.producer == variable else 0]
                needed = {int(u.needs[label if u.variable == variable else 0]) for u in distinct.values()}
                costs[variable][label] += sum(factor.cost[state, need] for need in needed)
            continue
        # States that no label gives may make the prices of two equal factors differ in shape.
        key = (factor.producer, factor.sources.tobytes(), tuple(sorted(distinct)), factor.cost.shape)
        if key in factors:
            factor = Factor(
                producer=factor.producer,
                sources=factor.sources,
                users=factors[key].users,
                cost=factors[key].cost + factor.cost,
            )
        else:
            users = tuple(distinct[k] for k in sorted(distinct))
            factor = Factor(producer=factor.producer, sources=factor.sources, users=users, cost=factor.cost)
        factors[key] = factor
    return Instance(costs=tuple(costs), factors=tuple(factors.values()))
