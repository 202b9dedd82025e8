"""Placements as small numbers, and the redistributions between them numbered, so that many are priced together.

placement   R = 0, P = 1, S(d) = 2 + d
layout      one digit for each mesh axis, to the base 16, the first axis lowest
need        the layout of a value, and above it that of its gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import numpy as np

from autopar.cost_model.communication.redistribution_table import Redistributions, steps_row
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard
from autopar.ir.redistribution import Collective, redistribute
from autopar.search.assign.instance import Ints, User

BASE = 16


def code_of(placement: Placement) -> int:
    """Code of a placement."""
    if isinstance(placement, Shard):
        assert placement.dim < BASE - 2, "tensors have at most 14 dimensions"
        return 2 + placement.dim
    return int(placement.is_partial())


def encode(layout: Layout) -> int:
    """Code of a layout."""
    code = 0
    for placement in reversed(layout):
        code = code * BASE + code_of(placement)
    return code


_PLACEMENTS: tuple[Placement, ...] = (Replicate(), Partial(), *(Shard(dim) for dim in range(BASE - 2)))


@lru_cache(maxsize=1 << 16)
def decode(code: int, num_axes: int) -> Layout:
    """Layout of a code on a mesh of ``num_axes`` axes."""
    return tuple(_PLACEMENTS[code // BASE**axis % BASE] for axis in range(num_axes))


# Digits that a layout may have, so that a source and a need fit into 64 bits.
MOST_AXES = 5
_GRADIENT = 1 << (4 * MOST_AXES)


def need_code(value: Ints, grad: Ints) -> Ints:
    """Codes of needs, from codes of layouts of values and of their gradients."""
    code: Ints = value + _GRADIENT * grad
    return code


def encode_need(value: Layout, grad: Layout) -> int:
    """Code of a need: layouts of a value and of its gradient."""
    return encode(value) + _GRADIENT * encode(grad)


def decode_need(code: int, num_axes: int) -> tuple[Layout, Layout]:
    """Layouts of a value and of its gradient, of a code on a mesh of ``num_axes`` axes."""
    return decode(code % _GRADIENT, num_axes), decode(code // _GRADIENT, num_axes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FactorPattern:
    """A factor of the inner problem without its costs; see ``instance.Factor``.

    states, wanted: codes of the layouts that the tensor is produced and needed in. numbers: of the redistributions
    between them; None if partial sums may remain.
    """

    states: Ints
    wanted: Ints
    numbers: Ints | None
    sources: Ints
    users: tuple[User, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterPattern:
    """How a group of parameters may be stored and used, in codes of needs.

    states: needs of the uses by the variable that decides the storage; state_of: the state, by label of that variable.
    later: the other uses, with the needs of their labels.
    """

    states: Sequence[tuple[int, ...]]
    state_of: Ints
    later: Sequence[tuple[User, Sequence[int]]]


@dataclass(slots=True)
class Moves:
    """Redistributions on meshes of ``num_axes``, numbered as they come up.

    A *pair* is a source and a need in one number, and whether a gradient comes back. patterns, stored: of transfers and
    groups of parameters, by their number and the options of their clusters.
    """

    num_axes: int
    patterns: dict[tuple[object, ...], FactorPattern] = field(default_factory=dict)
    stored: dict[tuple[object, ...], ParameterPattern] = field(default_factory=dict)
    _pairs: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # ascending
    _numbers: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of the pairs
    _rows: list[tuple[list[list[int]], list[int]]] = field(default_factory=list)
    _made: Redistributions | None = None  # of the first of the rows

    def __len__(self) -> int:
        return len(self._rows)

    def numbers(self, sources: Ints, needs: Ints, differentiable: bool) -> Ints:
        """(source, need) -> number, of all pairs of codes. differentiable: whether a gradient comes back."""
        pairs = 2 * (sources[:, None] + needs[None, :] * BASE**self.num_axes) + int(differentiable)
        places = np.searchsorted(self._pairs, pairs)
        new = places == len(self._pairs)
        new[~new] = self._pairs[places[~new]] != pairs[~new]
        if new.any():
            self._add(np.unique(pairs[new]))
            places = np.searchsorted(self._pairs, pairs)
        numbers: Ints = self._numbers[places]
        return numbers

    def _add(self, pairs: Ints) -> None:
        """Ascending ones that are not known."""
        numbers = np.arange(len(self._rows), len(self._rows) + len(pairs))
        self._rows += [self._row(pair) for pair in pairs.tolist()]
        places = np.searchsorted(self._pairs, pairs)
        self._pairs = np.insert(self._pairs, places, pairs)
        self._numbers = np.insert(self._numbers, places, numbers)

    def _row(self, pair: int) -> tuple[list[list[int]], list[int]]:
        both, differentiable = divmod(pair, 2)
        need, code = divmod(both, BASE**self.num_axes)
        source = decode(code, self.num_axes)
        steps = redistribute(source, *decode_need(need, self.num_axes))
        if not differentiable:
            steps = tuple(replace(s, backward=Collective.NONE) for s in steps if s.forward is not Collective.NONE)
        return steps_row(steps, source)

    def since(self, number: int) -> Redistributions:
        """Redistributions from ``number`` on."""
        done = 0 if self._made is None else len(self._made)
        if self._made is None or done < len(self._rows):
            more = Redistributions.of(self._rows[done:], self.num_axes)
            self._made = more if self._made is None else self._made.followed_by(more)
        return self._made.since(number)


def rows_class(rows: float, mesh: Mesh) -> float:
    """``rows``, or the least number that stands in the same relation to every product of axes.

    Prices depend on rows only by whether dividing them over some axes leaves one.
    """
    products = {1}
    for size in mesh.sizes:
        products |= {known * size for known in products}
    return float(min((p for p in products if p >= rows), default=prod(mesh.sizes) + 1))
