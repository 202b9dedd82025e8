"""The options of an op cluster on a mesh, as arrays, so that all of them are priced together.

A *pick* is the position of a choice among ``OpCluster.choices``; an option is one pick for each mesh axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import fx

from autopar.ir.analysis.op_clusters import BATCH, OpCluster
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.mesh import Mesh
from autopar.ir.placed.layouts import made_on_axis
from autopar.ir.rule import Assignment, factors_of_choice
from autopar.search.assign.instance import Floats, Ints
from autopar.search.pricing.placement_codes import BASE, MOST_AXES, Moves, code_of
from autopar.search.problem.arrivals import Tensor
from autopar.search.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """``size`` elements that the mesh axes on which a cluster takes one of the picks marked in ``picks`` have to
    divide, into parts that are multiples of ``multiple``.

    by_batch: the elements are of the global batch; a microbatch has its part.
    """

    picks: tuple[bool, ...]
    size: int
    by_batch: bool
    multiple: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The options of an op cluster on a mesh: joint choices for all axes. picks: (options, axes). degrees:
    (distinct, picks), the ranks that each pick divides among; of: the row of ``degrees`` of each option; first: an
    option with it."""

    group: OpCluster
    mesh: Mesh
    picks: Ints
    degrees: Ints
    of: Ints
    first: Ints

    @classmethod
    def made(cls, group: OpCluster, mesh: Mesh, picks: Ints) -> Options:
        """The options with these picks, one row each."""
        sizes = np.array(mesh.sizes, dtype=np.int64)
        chosen = picks[:, :, None] == np.arange(len(group.choices))
        every = np.where(chosen, sizes[None, :, None], 1).prod(axis=1)
        rows: dict[bytes, int] = {}  # faster than np.unique of rows
        of = np.array([rows.setdefault(row.tobytes(), len(rows)) for row in every], dtype=np.int64)
        first = np.unique(of, return_index=True)[1]
        return cls(group=group, mesh=mesh, picks=picks, degrees=every[first], of=of, first=first)

    def __len__(self) -> int:
        return len(self.picks)

    def assignment(self, option: int) -> Assignment:
        """Assignment of the leader under an option."""
        return tuple(self.group.choices[pick] for pick in self.picks[option].tolist())

    def member(self, node: fx.Node, option: int) -> Assignment:
        """Assignment of a member under an option."""
        return self.group.assignment(node, self.assignment(option))

    def layouts(self, of_pick: Ints) -> Ints:
        """Code of the layout under each option, from the codes of placements by pick."""
        powers: Ints = BASE ** np.arange(self.picks.shape[1], dtype=np.int64)
        found: Ints = of_pick[self.picks] @ powers
        return found

    @cached_property
    def code(self) -> bytes:
        """Equal for equal options, on any mesh."""
        return self.picks.tobytes()

    @cached_property
    def memo(self) -> dict[int, Floats]:
        """Seconds of the cluster's ops in a microbatch under each option, by the parts of the captured batch."""
        return {}


@dataclass(slots=True)
class Codes:
    """The placements of a workload's tensors by the picks of the clusters that decide them. Remembers them."""

    workload: Workload
    _moves: dict[int, Moves] = field(default_factory=dict)
    _results: dict[tuple[fx.Node, int], Ints] = field(default_factory=dict)
    _needs: dict[tuple[fx.Node, int], tuple[Ints, Ints]] = field(default_factory=dict)
    _limits: dict[int, tuple[Limit, ...]] = field(default_factory=dict)

    def moves(self, num_axes: int) -> Moves:
        """Numbered redistributions on meshes of ``num_axes`` axes. Raises InfeasiblePlan if there are too many axes."""
        if num_axes > MOST_AXES:
            raise InfeasiblePlan(
                f"a stage mesh of {num_axes} axes cannot be planned; expected at most {MOST_AXES}.\n"
                "  try: axes of one role joined into one"
            )
        return self._moves.setdefault(num_axes, Moves(num_axes))

    def tensor(self, tensor: Tensor) -> Ints:
        """Placement that a tensor is produced in, by pick of its producer's cluster."""
        key = (tensor.node, tensor.result)
        found = self._results.get(key)
        if found is None:
            group = self.workload.cluster_of(tensor.node)
            is_op = tensor.node in self.workload.repeats
            choices = [group.follow[choice][tensor.node] if is_op else choice for choice in group.choices]
            own = [made_on_axis(self.workload.analysis, tensor.node, tensor.result, choice) for choice in choices]
            found = self._results[key] = np.array([code_of(placement) for placement in own], dtype=np.int64)
        return found

    def need(self, node: fx.Node, position: int) -> tuple[Ints, Ints]:
        """Placements of an operand and of its gradient, by pick of the op's cluster."""
        found = self._needs.get((node, position))
        if found is None:
            group, rule = self.workload.cluster_of(node), self.workload.rule(node)
            pairs = [rule.operand(position, group.follow[choice][node]) for choice in group.choices]
            values, grads = ([code_of(pair[side]) for pair in pairs] for side in (0, 1))
            found = (np.array(values, dtype=np.int64), np.array(grads, dtype=np.int64))
            self._needs[node, position] = found
        return found

    def allows(
        self, group: OpCluster, picks: Ints, mesh: Mesh, num_microbatches: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask of the options of a cluster that divide every factor of every member."""
        sizes = np.array(mesh.sizes, dtype=np.int64)
        kept = np.ones(len(picks), dtype=bool)
        for limit in self.limits(group):
            degree = np.where(np.array(limit.picks)[picks], sizes, 1).prod(axis=1)
            size = limit.size // (num_microbatches if limit.by_batch else 1)
            kept &= (degree == 1) | (size % (degree * limit.multiple) == 0)
        return kept

    def limits(self, group: OpCluster) -> tuple[Limit, ...]:
        """Divisibility limits on the picks of a cluster."""
        found = self._limits.get(group.index)
        if found is None:
            made: dict[Limit, None] = {}
            for member in group.members:
                rule, batch = self.workload.rule(member), self.workload.roles.batch.get(member)
                picks: dict[str, set[int]] = {}
                for pick, choice in enumerate(group.choices):
                    for factor in factors_of_choice(group.follow[choice][member]):
                        picks.setdefault(factor, set()).add(pick)
                for factor, own in picks.items():
                    marked = tuple(pick in own for pick in range(len(group.choices)))
                    multiple = rule.multiples.get(factor, 1)
                    made[Limit(picks=marked, size=rule.sizes[factor], by_batch=factor == batch, multiple=multiple)] = (
                        None
                    )
            if group.leader is None:
                marked = tuple(choice == BATCH for choice in group.choices)
                made[Limit(picks=marked, size=self.workload.captured.batch_size, by_batch=True)] = None
            found = self._limits[group.index] = tuple(made)
        return found
