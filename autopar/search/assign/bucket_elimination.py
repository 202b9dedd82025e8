"""The inner problem solved by eliminating one unit after another (bucket elimination, Dechter 1999).

Every flow is a table over the options of its units. To eliminate unit u, with neighbours N in the tables it is in,

    T[N]  =  min over options of u of   cost_u + sum of the tables of u

replaces those tables; the minimising options are kept, and read back in reverse order. Exact. A model is a chain of
ops with a few parallel paths, so a unit has few neighbours left when its turn comes, and after
``dead_end_elimination`` few options: the tables are small. Where one would be large, ``eliminate`` gives up, and the
linear program is for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from autopar.search.assign.instance import Floats, Flow, Instance, Ints

# Entries of a table from which the linear program is faster. Halved or doubled: same plans, same work
# (docs/decisions/0021).
MAX_ENTRIES = 300_000


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs over the options of ``units``, which are ascending; one dimension for each."""

    units: tuple[int, ...]
    costs: Floats

    def over(self, units: tuple[int, ...]) -> Floats:
        """The same with dimensions of size 1 for units that it does not mention."""
        sizes = iter(self.costs.shape)
        return self.costs.reshape([next(sizes) if unit in self.units else 1 for unit in units])


def eliminate(instance: Instance, max_entries: int = MAX_ENTRIES) -> tuple[int, ...] | None:
    """A best selection; None if a table would have more than ``max_entries`` entries. Deterministic."""
    counts = instance.num_options
    tables = []
    for flow in instance.flows:
        units = tuple(sorted({flow.producer, *(user.unit for user in flow.users)}))
        if prod(counts[unit] for unit in units) > max_entries:
            return None
        tables.append(_Table(units, _costs(flow, units, counts)))
    around = {unit: {unit} for unit in range(len(counts))}
    for table in tables:
        for unit in table.units:
            around[unit].update(table.units)
    sizes = {unit: prod(counts[other] for other in others) for unit, others in around.items()}
    decided: list[tuple[int, tuple[int, ...], Ints]] = []
    while sizes:
        unit = min(sizes, key=lambda u: (sizes[u], u))
        if sizes.pop(unit) > max_entries:
            return None
        units = tuple(sorted(around[unit]))
        total = _Table((unit,), instance.costs[unit]).over(units)
        for table in tables:
            if unit in table.units:
                total = total + table.over(units)
        axis = units.index(unit)
        rest = (*units[:axis], *units[axis + 1 :])
        decided.append((unit, rest, total.argmin(axis=axis)))
        tables = [table for table in tables if unit not in table.units]
        if rest:
            tables.append(_Table(rest, total.min(axis=axis)))
        for other in rest:
            around[other] |= around[unit]
            around[other].remove(unit)
            sizes[other] = prod(counts[near] for near in around[other])
    chosen: dict[int, int] = {}
    for unit, rest, best in reversed(decided):
        chosen[unit] = int(best[tuple(chosen[other] for other in rest)])
    return tuple(chosen[unit] for unit in range(len(counts)))


def _costs(flow: Flow, units: tuple[int, ...], counts: tuple[int, ...]) -> Floats:
    """What a flow costs under all options of its units: each state that is needed, once."""

    def along(values: Ints, unit: int) -> Ints:
        return values.reshape([counts[unit] if other == unit else 1 for other in units])

    source = along(flow.sources, flow.producer)
    needs = [along(user.needs, user.unit) for user in flow.users]
    total: Floats = np.zeros([counts[unit] for unit in units])
    for number, need in enumerate(needs):
        price = flow.cost[source, need]
        for earlier in needs[:number]:
            price = np.where(need == earlier, 0.0, price)
        total = total + price
    return total
