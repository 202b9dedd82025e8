"""Placements and choices as small numbers, so that all options of a cluster are looked at together.

placement   R = 0, P = 1, S(d) = 2 + d
layout      one digit for each mesh axis, to the base 16, the first axis lowest
need        the layout of a value, and above it that of its gradient
pick        position of a choice among ``Cluster.choices``; an option is one pick for each mesh axis
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from torch import fx

from autopar.cost_model.redistributions import Redistributions, steps_row
from autopar.ir.clusters import BATCH, Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard
from autopar.ir.redistribution import Collective, redistribute
from autopar.ir.rule import Assignment, factors_of_choice
from autopar.search.instance import Ints
from autopar.search.workload import Tensor, Workload

_BASE = 16


def code_of(placement: Placement) -> int:
    if isinstance(placement, Shard):
        assert placement.dim < _BASE - 2, "tensors have at most 14 dimensions"
        return 2 + placement.dim
    return int(placement.is_partial())


def encode(layout: Layout) -> int:
    code = 0
    for placement in reversed(layout):
        code = code * _BASE + code_of(placement)
    return code


_PLACEMENTS: tuple[Placement, ...] = (Replicate(), Partial(), *(Shard(dim) for dim in range(_BASE - 2)))


@lru_cache(maxsize=1 << 16)
def decode(code: int, num_axes: int) -> Layout:
    return tuple(_PLACEMENTS[code // _BASE**axis % _BASE] for axis in range(num_axes))


# Digits that a layout may have, so that a source and a need fit into 64 bits.
_MOST_AXES = 5
_GRADIENT = 1 << (4 * _MOST_AXES)


def need_code(value: Ints, grad: Ints) -> Ints:
    code: Ints = value + _GRADIENT * grad
    return code


def encode_need(value: Layout, grad: Layout) -> int:
    return encode(value) + _GRADIENT * encode(grad)


def decode_need(code: int, num_axes: int) -> tuple[Layout, Layout]:
    return decode(code % _GRADIENT, num_axes), decode(code // _GRADIENT, num_axes)


@dataclass(slots=True)
class Moves:
    """Redistributions on meshes of ``num_axes``, numbered as they come up."""

    num_axes: int
    _numbers: dict[tuple[bool, int], int] = field(default_factory=dict)
    _rows: list[tuple[list[list[int]], list[int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._rows)

    def numbers(self, sources: Ints, needs: Ints, differentiable: bool) -> Ints:
        """(source, need) -> number, of all pairs of codes. differentiable: whether a gradient comes back."""
        found = [
            [self._number(differentiable, source + need) for source in sources.tolist()]
            for need in (needs * _BASE**self.num_axes).tolist()
        ]
        numbers: Ints = np.array(found, dtype=np.int64).T
        return numbers

    def _number(self, differentiable: bool, pair: int) -> int:
        found = self._numbers.get((differentiable, pair))
        if found is None:
            found = self._numbers[differentiable, pair] = len(self._rows)
            need, code = divmod(pair, _BASE**self.num_axes)
            source = decode(code, self.num_axes)
            steps = redistribute(source, *decode_need(need, self.num_axes))
            if not differentiable:
                steps = tuple(replace(s, backward=Collective.NONE) for s in steps if s.forward is not Collective.NONE)
            self._rows.append(steps_row(steps, source))
        return found

    def since(self, number: int) -> Redistributions:
        """Those from ``number`` on."""
        return Redistributions.of(self._rows[number:], self.num_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """``size`` elements that the axes on which a cluster takes a pick that ``picks`` marks have to divide.

    by_batch: they are of the whole batch; a microbatch has its part.
    """

    picks: tuple[bool, ...]
    size: int
    by_batch: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What a cluster may do on a mesh. picks: (options, axes). degrees: (distinct, picks), the ranks that each pick
    divides among; of: the row of ``degrees`` of each option; first: an option with it."""

    group: Cluster
    mesh: Mesh
    picks: Ints
    degrees: Ints
    of: Ints
    first: Ints

    @classmethod
    def made(cls, group: Cluster, mesh: Mesh, picks: Ints) -> Options:
        sizes = np.array(mesh.sizes, dtype=np.int64)
        chosen = picks[:, :, None] == np.arange(len(group.choices))
        every = np.where(chosen, sizes[None, :, None], 1).prod(axis=1)
        degrees, first, of = np.unique(every, axis=0, return_index=True, return_inverse=True)
        return cls(group=group, mesh=mesh, picks=picks, degrees=degrees, of=of.reshape(-1), first=first)

    def __len__(self) -> int:
        return len(self.picks)

    def leader(self, option: int) -> Assignment:
        """What the leader does."""
        return tuple(self.group.choices[pick] for pick in self.picks[option].tolist())

    def member(self, node: fx.Node, option: int) -> Assignment:
        return self.group.assignment(node, self.leader(option))

    def layouts(self, of_pick: Ints) -> Ints:
        """Code of the layout under each option, from the codes of placements by pick."""
        powers: Ints = _BASE ** np.arange(self.picks.shape[1], dtype=np.int64)
        found: Ints = of_pick[self.picks] @ powers
        return found

    @cached_property
    def memo(self) -> dict[object, object]:
        """Prices of these options that were worked out before."""
        return {}


@dataclass(slots=True)
class Codes:
    """The placements of a workload's tensors by the picks of the clusters that decide them. Remembers them."""

    load: Workload
    _moves: dict[int, Moves] = field(default_factory=dict)
    _results: dict[tuple[fx.Node, int], Ints] = field(default_factory=dict)
    _needs: dict[tuple[fx.Node, int], tuple[Ints, Ints]] = field(default_factory=dict)
    _limits: dict[int, tuple[Limit, ...]] = field(default_factory=dict)

    def moves(self, num_axes: int) -> Moves:
        """What is known of redistributions on meshes of so many axes."""
        return self._moves.setdefault(num_axes, Moves(num_axes))

    def tensor(self, tensor: Tensor) -> Ints:
        """Placement that a tensor is produced in, by pick of its producer's cluster."""
        key = (tensor.node, tensor.result)
        found = self._results.get(key)
        if found is None:
            group = self.load.cluster_of(tensor.node)
            if tensor.node in self.load.repeats:
                rule = self.load.rule(tensor.node)
                own = [rule.result(tensor.result, group.follow[choice][tensor.node]) for choice in group.choices]
            elif tensor.node in self.load.clusters.input_dims:
                own = [self.load.clusters.input_placement(tensor.node, choice) for choice in group.choices]
            else:
                own = [Replicate()] * len(group.choices)
            found = self._results[key] = np.array([code_of(placement) for placement in own], dtype=np.int64)
        return found

    def need(self, node: fx.Node, position: int) -> tuple[Ints, Ints]:
        """Placements of an operand and of its gradient, by pick of the op's cluster."""
        found = self._needs.get((node, position))
        if found is None:
            group, rule = self.load.cluster_of(node), self.load.rule(node)
            pairs = [rule.operand(position, group.follow[choice][node]) for choice in group.choices]
            values, grads = ([code_of(pair[side]) for pair in pairs] for side in (0, 1))
            found = (np.array(values, dtype=np.int64), np.array(grads, dtype=np.int64))
            self._needs[node, position] = found
        return found

    def allows(
        self, group: Cluster, picks: Ints, mesh: Mesh, num_microbatches: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which options of a cluster divide every factor of every member."""
        sizes = np.array(mesh.sizes, dtype=np.int64)
        kept = np.ones(len(picks), dtype=bool)
        for limit in self.limits(group):
            degree = np.where(np.array(limit.picks)[picks], sizes, 1).prod(axis=1)
            kept &= (limit.size // (num_microbatches if limit.by_batch else 1)) % degree == 0
        return kept

    def limits(self, group: Cluster) -> tuple[Limit, ...]:
        found = self._limits.get(group.index)
        if found is None:
            made: dict[Limit, None] = {}
            for member in group.members:
                rule, batch = self.load.rule(member), self.load.roles.batch.get(member)
                picks: dict[str, set[int]] = {}
                for pick, choice in enumerate(group.choices):
                    for factor in factors_of_choice(group.follow[choice][member]):
                        picks.setdefault(factor, set()).add(pick)
                for factor, own in picks.items():
                    marked = tuple(pick in own for pick in range(len(group.choices)))
                    made[Limit(picks=marked, size=rule.sizes[factor], by_batch=factor == batch)] = None
            if group.leader is None:
                marked = tuple(choice == BATCH for choice in group.choices)
                made[Limit(picks=marked, size=self.load.captured.batch_size, by_batch=True)] = None
            found = self._limits[group.index] = tuple(made)
        return found


def rows_class(rows: float, mesh: Mesh) -> float:
    """``rows``, or the least number that stands in the same relation to every product of axes.

    Prices depend on rows only by whether dividing them over some axes leaves one.
    """
    products = {1}
    for size in mesh.sizes:
        products |= {known * size for known in products}
    return float(min((p for p in products if p >= rows), default=prod(mesh.sizes) + 1))
