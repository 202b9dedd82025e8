"""The inner problem solved by eliminating one variable after another (bucket elimination, Dechter 1999).

Every factor is a table over the labels of its variables. To eliminate variable v, with neighbours N in its tables,

    T[N]  =  min over labels of v of   cost_v + sum of the tables of v

replaces those tables; the minimising labels are stored, and read back in reverse order. Exact. A model is a chain of
ops with a few parallel paths, so a variable has few neighbours left when it is eliminated, and after
``dead_end_elimination`` few labels: the tables are small. Where a table would be large, ``eliminate`` returns None and
the caller solves the linear program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from autopar.search.assign.instance import Factor, Floats, Instance, Ints

# Entries of a table from which the linear program is faster. Halved or doubled: same plans, same work
# (docs/decisions/0021).
MAX_ENTRIES = 300_000


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs over the labels of ``variables``, which are ascending; one dimension for each."""

    variables: tuple[int, ...]
    costs: Floats

    def over(self, variables: tuple[int, ...]) -> Floats:
        """The table with dimensions of size 1 for variables that it does not mention."""
        sizes = iter(self.costs.shape)
        return self.costs.reshape([next(sizes) if variable in self.variables else 1 for variable in variables])


def eliminate(instance: Instance, max_entries: int = MAX_ENTRIES) -> tuple[int, ...] | None:
    """A best labelling; None if a table would have more than ``max_entries`` entries. Deterministic."""
    counts = instance.num_labels
    tables = []
    for factor in instance.factors:
        variables = tuple(sorted({factor.producer, *(user.variable for user in factor.users)}))
        if prod(counts[variable] for variable in variables) > max_entries:
            return None
        tables.append(_Table(variables, _costs(factor, variables, counts)))
    around = {variable: {variable} for variable in range(len(counts))}
    for table in tables:
        for variable in table.variables:
            around[variable].update(table.variables)
    sizes = {variable: prod(counts[other] for other in others) for variable, others in around.items()}
    decided: list[tuple[int, tuple[int, ...], Ints]] = []
    while sizes:
        variable = min(sizes, key=lambda u: (sizes[u], u))
        if sizes.pop(variable) > max_entries:
            return None
        variables = tuple(sorted(around[variable]))
        total = _Table((variable,), instance.costs[variable]).over(variables)
        for table in tables:
            if variable in table.variables:
                total = total + table.over(variables)
        axis = variables.index(variable)
        rest = (*variables[:axis], *variables[axis + 1 :])
        decided.append((variable, rest, total.argmin(axis=axis)))
        tables = [table for table in tables if variable not in table.variables]
        if rest:
            tables.append(_Table(rest, total.min(axis=axis)))
        for other in rest:
            around[other] |= around[variable]
            around[other].remove(variable)
            sizes[other] = prod(counts[near] for near in around[other])
    chosen: dict[int, int] = {}
    for variable, rest, best in reversed(decided):
        chosen[variable] = int(best[tuple(chosen[other] for other in rest)])
    return tuple(chosen[variable] for variable in range(len(counts)))


def _costs(factor: Factor, variables: tuple[int, ...], counts: tuple[int, ...]) -> Floats:
    """Table of a factor over the labels of its variables: each state that is needed is paid once."""

    def along(values: Ints, variable: int) -> Ints:
        return values.reshape([counts[variable] if other == variable else 1 for other in variables])

    source = along(factor.sources, factor.producer)
    needs = [along(user.needs, user.variable) for user in factor.users]
    total: Floats = np.zeros([counts[variable] for variable in variables])
    for number, need in enumerate(needs):
        price = factor.cost[source, need]
        for earlier in needs[:number]:
            price = np.where(need == earlier, 0.0, price)
        total = total + price
    return total
