"""Seconds of many redistributions at once.

The steps of a redistribution depend on its layouts alone, and what they take on the mesh. So steps are written down
once, as rows of numbers, and priced on each mesh together. Local copies count too: what a split cuts off, and the
reordering around a collective along a dimension that is not the first, unless those before it have one element on a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.compute.op_time import Affine, OpTime
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Shard
from autopar.ir.redistribution import Collective, Step

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Of the bytes that a gather moves forward, and backward, the part that is left where it is in narrow floats.
Shares = tuple[float, float]
WHOLE: Shares = (1.0, 1.0)

_KINDS = tuple(Collective)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_GROWING = _NUMBER[Collective.ALL_GATHER]


def _among(*kinds: Collective) -> NDArray[np.bool_]:
    """Whether a collective is one of these, by its number; false for the last, which -1 (no step) finds."""
    return np.array([*(kind in kinds for kind in _KINDS), False])


_SHRINKING = _among(Collective.SPLIT, Collective.REDUCE_SCATTER)
_LOCAL = _among(Collective.SPLIT, Collective.DIVIDE)
_REORDER_GATHERED = _among(Collective.ALL_GATHER, Collective.ALL_TO_ALL)
_REORDER_SHARDED = _among(Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)

# Columns of a step: mesh axis (-1 for no step), collectives, and dimensions that are gathered and sharded (-1: none).
_AXIS, _FORWARD, _BACKWARD, _GATHER, _SHARD = range(5)


def steps_row(steps: Sequence[Step], source: Layout) -> tuple[list[list[int]], list[int]]:
    """Steps out of layout ``source`` as numbers, and the dimension that each axis shards before them (-1: none)."""
    rows = [
        [
            step.axis,
            _NUMBER[step.forward],
            _NUMBER[step.backward],
            -1 if step.gather_dim is None else step.gather_dim,
            -1 if step.shard_dim is None else step.shard_dim,
        ]
        for step in steps
    ]
    return rows, [placement.dim if isinstance(placement, Shard) else -1 for placement in source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds as fixed + per_byte * global bytes of the tensor, forward and backward, of every redistribution.

    gathers, gathers_back: whether it is one step, which is an all-gather, or a reduce-scatter, whose backward is one.
    """

    forward_fixed: Floats
    forward_per_byte: Floats
    backward_fixed: Floats
    backward_per_byte: Floats
    gathers: Bools
    gathers_back: Bools

    def at(self, number: int, shares: Shares = WHOLE) -> Affine:
        """Seconds of redistribution ``number``, affine in the bytes of the tensor."""
        forward, backward = (float(own) for own in self.per_byte(np.array(number), shares))
        return Affine(float(self.forward_fixed[number]), forward, float(self.backward_fixed[number]), backward)

    def per_byte(self, numbers: Ints, shares: Shares = WHOLE) -> tuple[Floats, Floats]:
        """Seconds per byte of some, forward and backward."""
        return (
            self.forward_per_byte[numbers] * np.where(self.gathers[numbers], shares[0], 1.0),
            self.backward_per_byte[numbers] * np.where(self.gathers_back[numbers], shares[1], 1.0),
        )

    def followed_by(self, other: Times) -> Times:
        """These redistributions, then those of ``other``."""
        return Times(
            **{own.name: np.concatenate([getattr(self, own.name), getattr(other, own.name)]) for own in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistributions:
    """steps: (number, most steps, 5), as above. sources: (number, axes), the dimension an axis shards at first."""

    steps: Ints
    sources: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[list[list[int]], list[int]]], num_axes: int) -> Redistributions:
        """From the row of ``steps_row`` for each."""
        most = max((len(steps) for steps, _ in rows), default=0)
        steps = np.full((len(rows), most, 5), -1, dtype=np.int64)
        for number, (own, _) in enumerate(rows):
            if own:
                steps[number, : len(own)] = own
        sources = np.array([source for _, source in rows], dtype=np.int64).reshape(len(rows), num_axes)
        return cls(steps=steps, sources=sources)

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, number: int) -> Redistributions:
        """Redistributions from ``number`` on."""
        return Redistributions(steps=self.steps[number:], sources=self.sources[number:])

    def followed_by(self, other: Redistributions) -> Redistributions:
        """These redistributions, then those of ``other``."""
        most = max(self.steps.shape[1], other.steps.shape[1])
        steps = (
            np.pad(own.steps, ((0, 0), (0, most - own.steps.shape[1]), (0, 0)), constant_values=-1)
            for own in (self, other)
        )
        return Redistributions(steps=np.concatenate(list(steps)), sources=np.concatenate([self.sources, other.sources]))

    def times(self, prices: LinkPrices, rows: float = inf) -> Times:
        """On one mesh. rows: global size of dimension 0."""
        sizes = prices.sizes
        local = 1.0 / np.where(self.sources >= 0, sizes, 1).prod(axis=1)
        lead = rows / np.where(self.sources == 0, sizes, 1).prod(axis=1)  # local size of dimension 0
        total = np.zeros((4, len(self.steps)))
        for place in range(self.steps.shape[1]):
            axis, forward, backward, gather, shard = self.steps[:, place].T
            # Where there is no step, the last collective on the last axis is priced and then left out.
            size = np.where(axis >= 0, sizes[axis], 1)
            after = np.where(_SHRINKING[forward], local / size, local)
            after = np.where(forward == _GROWING, local * size, after)
            large, small = np.maximum(local, after), np.minimum(local, after)
            gathered, sharded = (_reordered(dim, lead) for dim in (gather, shard))
            some = size > 1
            for row, kind, first, second in ((0, forward, gathered, sharded), (2, backward, sharded, gathered)):
                cut = _LOCAL[kind]
                copies = _REORDER_GATHERED[kind] * first + _REORDER_SHARDED[kind] * second
                moved = np.where(cut, 2 * small, 2 * large * copies)
                total[row] += some * (prices.fixed[kind, axis] + prices.launch_s * np.where(cut, 1, copies))
                total[row + 1] += some * (prices.per_byte[kind, axis] * large + prices.copy_s * moved)
            local = after
            lead = lead * np.where(gather == 0, size, 1) / np.where(shard == 0, size, 1)
        ahead = self.steps[:, :1, _FORWARD]
        single = (self.steps[:, 1:, _AXIS] < 0).all(axis=1)
        return Times(
            forward_fixed=total[0],
            forward_per_byte=total[1],
            backward_fixed=total[2],
            backward_per_byte=total[3],
            gathers=single & (ahead == _GROWING).any(axis=1),
            gathers_back=single & (ahead == _NUMBER[Collective.REDUCE_SCATTER]).any(axis=1),
        )


def _reordered(dim: Ints, lead: Floats) -> NDArray[np.bool_]:
    """Whether pieces along ``dim`` do not lie one after the other. lead: local size of dimension 0."""
    apart: NDArray[np.bool_] = (dim > 0) & ~((dim == 1) & (lead <= 1))
    return apart


@dataclass(frozen=True, kw_only=True)
class LinkPrices:
    """Costs of redistribution steps on one mesh.

    fixed, per_byte: of each collective along each axis, by the bytes of its payload. launch_s: of a local copy, copy_s
    for each byte that it reads or writes.
    """

    sizes: Ints
    fixed: Floats
    per_byte: Floats
    launch_s: float
    copy_s: float

    @classmethod
    def of(cls, fabric: Fabric) -> LinkPrices:
        """The rates of all collectives along all axes of a mesh."""
        axes = range(len(fabric.mesh))
        rates = [[fabric.rate(kind, axis) for axis in axes] for kind in _KINDS]
        table = np.array(rates, dtype=np.float64).reshape(len(_KINDS), len(axes), 2)
        table *= np.array([fabric.cluster.device.exposed(kind) for kind in _KINDS])[:, None, None]
        device = fabric.cluster.device
        return cls(
            sizes=np.array(fabric.mesh.sizes, dtype=np.int64),
            fixed=table[:, :, 0],
            per_byte=table[:, :, 1],
            launch_s=device.kernel_launch_s,
            copy_s=device.memory_seconds(1.0),
        )


def redistribution_time(
    steps: Sequence[Step],
    numel: int,
    itemsize: int,
    source: Layout,
    mesh: Mesh,
    cluster: Cluster,
    rows: float | None = None,
) -> OpTime:
    """Seconds, forward and backward, of the steps that take a tensor of global ``numel`` out of layout ``source``.

    rows: global size of dimension 0, if known.
    """
    prices = LinkPrices.of(Fabric(cluster, mesh))
    return redistribution(prices, steps, source, inf if rows is None else rows).at(numel * itemsize)


def redistribution(
    prices: LinkPrices, steps: Sequence[Step], source: Layout, rows: float = inf, shares: Shares = WHOLE
) -> Affine:
    """Seconds of one redistribution, by the global bytes of the tensor (of one microbatch)."""
    return Redistributions.of([steps_row(steps, source)], len(prices.sizes)).times(prices, rows).at(0, shares)
