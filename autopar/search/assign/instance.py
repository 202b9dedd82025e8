"""The inner problem in the abstract: which choice each cluster takes, given what the choices cost.

An instance has *units* (clusters of ops), each of which takes one of its *options* (a joint choice over the
mesh axes), and *flows* (tensors). The option of a flow's producer decides the state the tensor is produced in,
the option of each user the state it needs; the tensor is converted once into every state that some user
needs. The objective is

    sum_u cost_u[o_u]  +  sum_flows  sum_{q in needed}  cost_flow[s, q]      needed = {need_k[o_k] : users k}

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
    """One use of a flow: ``needs[o]`` is the state that option ``o`` of ``unit`` needs the tensor in."""

    unit: int
    needs: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """One tensor: ``sources[o]`` is the state in which option ``o`` of ``producer`` leaves it.

    cost: price of each (source state, needed state), all repeats of the tensor together; not negative.
    """

    producer: int
    sources: Ints
    users: tuple[User, ...]
    cost: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """costs: for each unit the cost of each of its options; flows: what the options cost together."""

    costs: tuple[Floats, ...]
    flows: tuple[Flow, ...]

    @property
    def num_options(self) -> tuple[int, ...]:
        return tuple(len(cost) for cost in self.costs)


def value(instance: Instance, selection: Sequence[int]) -> float:
    """Objective of taking option ``selection[u]`` for each unit ``u``."""
    total = float(sum(cost[option] for cost, option in zip(instance.costs, selection, strict=True)))
    for flow in instance.flows:
        state = flow.sources[selection[flow.producer]]
        needed = {int(user.needs[selection[user.unit]]) for user in flow.users}
        total += float(sum(flow.cost[state, need] for need in needed))
    return total


def brute_force(instance: Instance) -> tuple[float, tuple[int, ...]]:
    """The best selection by trying all of them; exponential, for tests."""
    return min((value(instance, s), s) for s in product(*(range(n) for n in instance.num_options)))


def restrict(instance: Instance, kept: Sequence[Ints]) -> Instance:
    """The instance with only the options ``kept[u]`` of each unit; states that nobody uses any more vanish."""
    costs = tuple(cost[keep] for cost, keep in zip(instance.costs, kept, strict=True))
    smaller = {unit for unit, keep in enumerate(kept) if len(keep) < len(instance.costs[unit])}
    flows = []
    for flow in instance.flows:
        if flow.producer not in smaller and not any(user.unit in smaller for user in flow.users):
            flows.append(flow)
            continue
        sources, from_source = np.unique(flow.sources[kept[flow.producer]], return_inverse=True)
        needs = [user.needs[kept[user.unit]] for user in flow.users]
        used = np.unique(np.concatenate(needs))
        users = tuple(
            User(unit=user.unit, needs=np.searchsorted(used, need))
            for user, need in zip(flow.users, needs, strict=True)
        )
        flows.append(
            Flow(
                producer=flow.producer,
                sources=from_source.reshape(-1),
                users=users,
                cost=flow.cost[np.ix_(sources, used)],
            )
        )
    return Instance(costs=costs, flows=tuple(flows))


def absorb(instance: Instance) -> Instance:
    """The same problem with fewer flows: what one unit alone decides becomes its own cost.

    Users with equal needs of one unit are merged, flows that cost nothing dropped, and flows whose producer
    and users are one unit added to the costs of that unit. Units with a single option count as decided.
    """
    costs = [cost.copy() for cost in instance.costs]
    flows: dict[tuple[object, ...], Flow] = {}
    for flow in instance.flows:
        if not flow.cost.any():
            continue
        distinct = {(user.unit, user.needs.tobytes()): user for user in flow.users}
        deciding = {flow.producer, *(unit for unit, _ in distinct)}
        open_units = {unit for unit in deciding if len(costs[unit]) > 1}
        if len(open_units) <= 1:
            unit = next(iter(open_units), flow.producer)
            for option in range(len(costs[unit])):
                state = flow.sources[option if flow.producer == unit else 0]
                needed = {int(u.needs[option if u.unit == unit else 0]) for u in distinct.values()}
                costs[unit][option] += sum(flow.cost[state, need] for need in needed)
            continue
        # States that nobody is ever in may make the prices of two equal flows differ in shape.
        key = (flow.producer, flow.sources.tobytes(), tuple(sorted(distinct)), flow.cost.shape)
        if key in flows:
            flow = Flow(
                producer=flow.producer, sources=flow.sources, users=flows[key].users, cost=flows[key].cost + flow.cost
            )
        else:
            users = tuple(distinct[k] for k in sorted(distinct))
            flow = Flow(producer=flow.producer, sources=flow.sources, users=users, cost=flow.cost)
        flows[key] = flow
    return Instance(costs=tuple(costs), flows=tuple(flows.values()))
