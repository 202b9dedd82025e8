"""The inner problem solved exactly with HiGHS.

Variables:  x[u,o]    1 if unit u takes option o
            y[f,s,q]  1 if flow f, produced in state s, is converted into state q; continuous, it ends up integral

    minimise   sum cost_u[o] x[u,o]  +  sum cost_f[s,q] y[f,s,q]

    (one)       sum_o x[u,o] = 1                                    for each unit u
    (produced)  y[f,s,q] <= X[f,s]                                  for each f, s, q            flows of several users
    (needed)    sum_s y[f,s,q] >= Z[f,k,q]                          for each f, user k, q
    (leaves)    sum_{q that k may need} y[f,s,q] >= X[f,s]          for each f, user k, s

where X[f,s] sums x over the options of the producer that leave state s, and Z[f,k,q] over the options of user k
that need q. With one user (needed) and (leaves) hold with equality: the flow is a transport between the two.
(leaves) is implied for integral x; it makes the linear relaxation tight, so that the integer solver is only
called for if the relaxation is fractional. Where producer and user are one unit, pairs that no option makes
together are left out.

Before, ``dominance.reduce`` removes options that cannot be needed; what is left is often a handful.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from autopar.search.dominance import reduce
from autopar.search.instance import Flow, Instance, Ints, value

_INTEGRAL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """selection: option of each unit; objective: its value; num_columns: variables of the reduced program."""

    selection: tuple[int, ...]
    objective: float
    num_columns: int
    branched: bool


def solve(instance: Instance) -> Solution:
    """The best selection. Deterministic, one thread."""
    reduced, kept = reduce(instance)
    options: Sequence[int]
    columns, branched = 0, False
    if all(n == 1 for n in reduced.num_options):
        options = [0] * len(kept)
    else:
        program = _Program()
        program.add(reduced)
        columns = len(program.cost)
        options, branched = program.run(reduced)
    selection = tuple(int(keep[option]) for keep, option in zip(kept, options, strict=True))
    return Solution(selection=selection, objective=value(instance, selection), num_columns=columns, branched=branched)


@dataclass(slots=True)
class _Program:
    """The columns and rows of the linear program, being built."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    x: list[Ints] = field(default_factory=list)

    def columns(self, costs: Sequence[float]) -> Ints:
        first = len(self.cost)
        self.cost.extend(costs)
        return np.arange(first, len(self.cost))

    def row(self, lower: float, upper: float, plus: Sequence[int], minus: Sequence[int] = ()) -> None:
        self.lower.append(lower)
        self.upper.append(upper)
        self.index.extend(plus)
        self.index.extend(minus)
        self.weight.extend([1.0] * len(plus))
        self.weight.extend([-1.0] * len(minus))
        self.start.append(len(self.index))

    def add(self, instance: Instance) -> None:
        for cost in instance.costs:
            self.x.append(self.columns(cost.tolist()))
        for x in self.x:
            self.row(1.0, 1.0, x.tolist())
        for flow in instance.flows:
            self._add_flow(flow)

    def _add_flow(self, flow: Flow) -> None:
        infinity = highspy.kHighsInf
        num_sources, num_needs = flow.cost.shape
        producer = self.x[flow.producer]
        produced = [producer[flow.sources == state].tolist() for state in range(num_sources)]
        possible = np.ones(flow.cost.shape, dtype=bool)
        if len(flow.users) == 1 and flow.users[0].unit == flow.producer:
            possible[:] = False
            possible[flow.sources, flow.users[0].needs] = True
        y = np.full(flow.cost.shape, -1, dtype=np.int64)
        y[possible] = self.columns(flow.cost[possible].tolist())
        alone = len(flow.users) == 1
        for user in flow.users:
            mine = self.x[user.unit]
            may = np.unique(user.needs)
            for need in may.tolist():
                into = y[:, need][possible[:, need]].tolist()
                self.row(0.0, 0.0 if alone else infinity, into, mine[user.needs == need].tolist())
            for state in range(num_sources):
                out = [int(y[state, need]) for need in may if possible[state, need]]
                self.row(0.0, 0.0 if alone else infinity, out, produced[state])
        if not alone:
            for state in range(num_sources):
                for need in range(num_needs):
                    self.row(-infinity, 0.0, [int(y[state, need])], produced[state])

    def run(self, instance: Instance) -> tuple[list[int], bool]:
        """Solve the relaxation, then the integer program if that came out fractional."""
        scale = max(abs(c) for c in self.cost) or 1.0
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.cost), len(self.lower)
        program.col_cost_ = np.asarray(self.cost) / scale * 1e4
        program.col_lower_ = np.zeros(len(self.cost))
        program.col_upper_ = np.ones(len(self.cost))
        program.row_lower_, program.row_upper_ = np.asarray(self.lower), np.asarray(self.upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.asarray(self.start, dtype=np.int32)
        program.a_matrix_.index_ = np.asarray(self.index, dtype=np.int32)
        program.a_matrix_.value_ = np.asarray(self.weight)
        values = _optimum(program)
        choices = [values[x] for x in self.x]
        if all(c.max() > 1 - _INTEGRAL for c in choices):
            return [int(c.argmax()) for c in choices], False
        binary = sum(len(x) for x in self.x)
        kinds = [highspy.HighsVarType.kInteger] * binary
        program.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (len(self.cost) - binary)
        values = _optimum(program)
        return [int(values[x].argmax()) for x in self.x], True


def _optimum(program: highspy.HighsLp) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    solver = highspy.Highs()
    for option, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("mip_rel_gap", 0.0)):
        solver.setOptionValue(option, setting)
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    assert status == highspy.HighsModelStatus.kOptimal, f"HiGHS stopped with {status}"
    return np.asarray(solver.getSolution().col_value)
