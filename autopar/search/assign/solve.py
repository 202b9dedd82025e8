"""The inner problem solved exactly: by elimination and message passing where they suffice, else with HiGHS.

Columns:  x[v,o]    1 if variable v takes label o
          y[f,s,q]  1 if factor f, produced in state s, is converted into state q; continuous, it ends up integral

    minimise   sum cost_v[o] x[v,o]  +  sum cost_f[s,q] y[f,s,q]

    (one)       sum_o x[v,o] = 1                                    for each variable v
    (produced)  y[f,s,q] <= X[f,s]                                  for each f, s, q            factors of several users
    (needed)    sum_s y[f,s,q] >= Z[f,k,q]                          for each f, user k, q
    (leaves)    sum_{q that k may need} y[f,s,q] >= X[f,s]          for each f, user k, s

where X[f,s] sums x over the labels of the producer that leave state s, and Z[f,k,q] over the labels of user k
that need q. With one user (needed) and (leaves) hold with equality: the factor is a transport between the two.
(leaves) is implied for integral x; it makes the linear relaxation tight, so that the integer solver is only
called for if the relaxation is fractional. Where producer and user are one variable, pairs that no label makes
together are left out.

If the tables are not small at once, ``message_passing.prune`` removes labels that no best labelling has, and mostly
leaves one for each variable; otherwise ``dead_end_elimination.reduce`` removes some that are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from autopar.search.assign.bucket_elimination import eliminate
from autopar.search.assign.dead_end_elimination import reduce
from autopar.search.assign.instance import Factor, Floats, Instance, Ints, absorb, restrict, value
from autopar.search.assign.message_passing import prune

# Distance from a whole number up to which a variable of the linear program is one. HiGHS's mip_feasibility_tolerance.
_INTEGRAL = 1e-6

# Entries of tables up to which elimination is faster than removing labels first. Halved or doubled: same plans, CPU
# time of the search within 2 % (docs/decisions/0021).
_EASY_ENTRIES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A labelling of least cost.

    labelling: the label of each variable. objective: its cost. num_columns: columns of the linear program, 0 if none
    was needed. branched: whether its relaxation was fractional, so that the integer program was solved.
    """

    labelling: tuple[int, ...]
    objective: float
    num_columns: int
    branched: bool


def solve(instance: Instance) -> Solution:
    """The best labelling. Deterministic, one thread."""
    labelling = eliminate(instance, _EASY_ENTRIES)
    if labelling is not None:
        return Solution(labelling=labelling, objective=value(instance, labelling), num_columns=0, branched=False)
    left = absorb(instance)
    kept = prune(left)
    columns, branched = 0, False
    labels: Sequence[int] | None = [0] * len(kept)
    if any(len(keep) > 1 for keep in kept):
        left = absorb(restrict(left, kept))
        labels = eliminate(left)
    if labels is None:
        left, fewer = reduce(left)
        kept = [keep[more] for keep, more in zip(kept, fewer, strict=True)]
        labels = eliminate(left)
    if labels is None:
        columns = sum(left.num_labels) + sum(factor.cost.size for factor in left.factors)
        labels, branched = solve_program(left)
    labelling = tuple(int(keep[label]) for keep, label in zip(kept, labels, strict=True))
    return Solution(labelling=labelling, objective=value(instance, labelling), num_columns=columns, branched=branched)


def solve_program(instance: Instance) -> tuple[list[int], bool]:
    """The best labelling by linear programming, and whether the relaxation was fractional."""
    program = _Program()
    program.add(instance)
    return program.run()


@dataclass(slots=True)
class _Program:
    """The linear program, being built: columns, and rows as their bounds and (row, column, weight) entries."""

    num_columns: int = 0
    num_rows: int = 0
    cost: list[Floats] = field(default_factory=list)
    lower: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    entries: list[tuple[Ints, Ints, float]] = field(default_factory=list)
    x: list[Ints] = field(default_factory=list)

    def columns(self, costs: Floats) -> Ints:
        """Append columns in [0, 1] with these costs; returns their indices."""
        first, self.num_columns = self.num_columns, self.num_columns + len(costs)
        self.cost.append(costs)
        return np.arange(first, self.num_columns)

    def rows(self, number: int, lower: float, upper: float) -> int:
        """Append ``number`` rows with bounds ``lower`` and ``upper``; returns the index of the first."""
        first, self.num_rows = self.num_rows, self.num_rows + number
        self.lower.append(np.full(number, lower))
        self.upper.append(np.full(number, upper))
        return first

    def add(self, instance: Instance) -> None:
        """Append the columns and rows of an instance."""
        self.x = [self.columns(cost) for cost in instance.costs]
        one = self.rows(len(self.x), 1.0, 1.0)
        for variable, x in enumerate(self.x):
            self.entries.append((np.full(len(x), one + variable), x, 1.0))
        for factor in instance.factors:
            self._add_factor(factor)

    def _add_factor(self, factor: Factor) -> None:
        infinity = highspy.kHighsInf
        num_sources, num_needs = factor.cost.shape
        producer = self.x[factor.producer]
        possible = np.ones(factor.cost.shape, dtype=bool)
        if len(factor.users) == 1 and factor.users[0].variable == factor.producer:
            possible[:] = False
            possible[factor.sources, factor.users[0].needs] = True
        y = np.full(factor.cost.shape, -1, dtype=np.int64)
        y[possible] = self.columns(factor.cost[possible])
        alone = len(factor.users) == 1
        for user in factor.users:
            may = np.zeros(num_needs, dtype=bool)
            may[user.needs] = True
            state, need = np.nonzero(possible & may)
            used = y[state, need]
            needed = self.rows(num_needs, 0.0, 0.0 if alone else infinity)
            self.entries += [(needed + need, used, 1.0), (needed + user.needs, self.x[user.variable], -1.0)]
            left = self.rows(num_sources, 0.0, 0.0 if alone else infinity)
            self.entries += [(left + state, used, 1.0), (left + factor.sources, producer, -1.0)]
        if not alone:
            state, need = np.nonzero(possible)
            produced = self.rows(num_sources * num_needs, -infinity, 0.0)
            self.entries.append((produced + state * num_needs + need, y[state, need], 1.0))
            every = produced + factor.sources[:, None] * num_needs + np.arange(num_needs)
            self.entries.append((every.reshape(-1), np.repeat(producer, num_needs), -1.0))

    def run(self) -> tuple[list[int], bool]:
        """Solve the relaxation, then the integer program if that came out fractional."""
        cost = np.concatenate(self.cost)
        scale = float(np.abs(cost).max()) or 1.0
        row, column = (np.concatenate([entry[side] for entry in self.entries]) for side in (0, 1))
        weight = np.concatenate([np.full(len(rows), weight) for rows, _, weight in self.entries])
        order = np.argsort(row, kind="stable")
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self.num_columns, self.num_rows
        program.col_cost_ = cost / scale * 1e4
        program.col_lower_ = np.zeros(self.num_columns)
        program.col_upper_ = np.ones(self.num_columns)
        program.row_lower_, program.row_upper_ = np.concatenate(self.lower), np.concatenate(self.upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=self.num_rows))])
        program.a_matrix_.start_ = starts.astype(np.int32)
        program.a_matrix_.index_ = column[order].astype(np.int32)
        program.a_matrix_.value_ = weight[order]
        values = _optimum(program)
        choices = [values[x] for x in self.x]
        if all(c.max() > 1 - _INTEGRAL for c in choices):
            return [int(c.argmax()) for c in choices], False
        binary = sum(len(x) for x in self.x)
        kinds = [highspy.HighsVarType.kInteger] * binary
        program.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (self.num_columns - binary)
        values = _optimum(program)
        return [int(values[x].argmax()) for x in self.x], True


def _optimum(program: highspy.HighsLp) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    solver = _Quiet()
    for name, setting in (("threads", 1), ("random_seed", 0), ("mip_rel_gap", 0.0)):
        solver.setOptionValue(name, setting)
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    assert status == highspy.HighsModelStatus.kOptimal, f"HiGHS stopped with {status}"
    return np.asarray(solver.getSolution().col_value)


class _Quiet(highspy.Highs):
    """A solver that prints nothing: from version 1.16 HiGHS says who it is on standard output as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)

    def enableCallbacks(self) -> None:
        # The first call of those by which it is made.
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
