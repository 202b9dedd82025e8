"""Records of what parameters and their gradients cost: sums over ranks, and under ZeRO gathers and scatters.

ZeRO works in units (``zero_units``), within which parameters on one mesh travel together. How often a unit is gathered
and its gradients are scattered follows from its ZeRO stage and from the order of passes:

    ZeRO stage              gathered where it is not there      gone after             scattered after
    1                       before a pass                       the last backward      the last backward
    2                       before a pass                       the last backward      every backward
    3                       before a pass                       every backward         every backward
    3, resharded forward    before a pass                       every pass             every backward

Of a split backward the input-gradient pass (I) reads parameters, and the weight-gradient pass (W) makes gradients.

Parameters that are gathered in 8 bits (``ZeroUnit.narrow``) have one all-reduce of their maxima ahead of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autopar.ir.lowered.inside import Phase
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.records import PIPELINE_AXIS, Cause, Record
from autopar.ir.placed.storage import zero_dim
from autopar.ir.placed.zero_units import ZeroUnit, axes_of_maxima, parameter_readers, stages_that_read, zero_units
from autopar.ir.placement import local_shape
from autopar.ir.precision import itemsize_of, narrow_dtype
from autopar.ir.schedule import Action, Pipelining, work_of


@dataclass(frozen=True, slots=True)
class Times:
    """How often a step gathers a unit's parameters, in forward and in backward passes, and scatters its gradients."""

    forward: int
    backward: int
    scattered: int


def times_of(order: tuple[Action, ...], zero_stage: int, *, reshards: bool) -> Times:
    """What a unit at ``zero_stage`` (1 to 3) does in a step.

    order: the passes of its pipeline stage. reshards: the unit is resharded after each forward.
    """
    kinds = [kind for kind in map(work_of, order) if kind is not None]
    there, forward, backward, scattered = False, 0, 0, 0
    left = len(kinds) - kinds.count("F") - kinds.count("I")
    for kind in kinds:
        if not there and kind != "W":
            forward, backward = forward + (kind == "F"), backward + (kind != "F")
        there = not (reshards if kind == "F" else zero_stage == 3)
        if kind in "BW":
            left -= 1
            there = there and left > 0
            scattered += left == 0 or zero_stage >= 2
    return Times(forward, backward, scattered)


def parameter_communication(placed: PlacedModel, pipelining: Pipelining) -> tuple[Record, ...]:
    """Every collective over parameters and their gradients of a step under ``pipelining``."""
    return tuple(_Step(placed, pipelining).records())


@dataclass(frozen=True)
class _Step:
    """A training step of a placed model."""

    placed: PlacedModel
    pipelining: Pipelining

    def records(self) -> Iterator[Record]:
        units = zero_units(self.placed)
        divided = {name for unit in units for name in unit.parameters}
        for name, blocks in parameter_readers(self.placed).items():
            yield from self._sums(name, stages_that_read(self.placed, blocks), name in divided)
        for unit in units:
            yield from self._zero(unit)
        for stage in sorted({unit.stage for unit in units}):
            yield from self._maxima(stage, [name for unit in units if unit.stage == stage for name in unit.narrow])

    def _shape(self, name: str) -> tuple[int, ...]:
        """Local shape of a parameter, before ZeRO."""
        node = self.placed.analysis.names[name]
        return tuple(local_shape(node.meta["val"].shape, self.placed.storage[name].layout, self.placed.mesh))

    def _sums(self, name: str, stages: tuple[int, ...], divided: bool) -> Iterator[Record]:
        placed, storage = self.placed, self.placed.storage[name]
        if name not in placed.analysis.trained:
            return
        itemsize = placed.analysis.names[name].meta["val"].dtype.itemsize
        numel = self._shard_numel(name) if divided else prod(self._shape(name))
        axes = tuple(a for a in storage.partial_axes if not (divided and a in storage.zero_axes))
        if prod(placed.mesh.sizes[axis] for axis in axes) > 1:
            # Stages of one rank share their copy.
            for stage in {self.pipelining.rank_of(stage): stage for stage in stages}.values():
                yield self._record("gradient", name, "all_reduce", "backward", axes, numel * itemsize, 1, (stage,))
        if len(set(map(self.pipelining.rank_of, stages))) > 1:
            yield self._record("gradient", name, "all_reduce", "backward", (), numel * itemsize, 1, stages)

    def _shard_numel(self, name: str) -> int:
        """Elements of the piece of a parameter that one rank has under ZeRO, padded to be as large as any."""
        shape, size = self._shape(name), self._shards(self.placed.storage[name].zero_axes)
        dim = zero_dim(shape, size)
        return -(-shape[dim] // size) * prod(shape[:dim]) * prod(shape[dim + 1 :])

    def _shards(self, zero_axes: tuple[int, ...]) -> int:
        return prod(self.placed.mesh.sizes[axis] for axis in zero_axes if axis in self.placed.shard_axes)

    def _maxima(self, stage: int, names: list[str]) -> Iterator[Record]:
        """What ranks agree on before they gather parameters in 8 bits: a float32 of each."""
        storage = [self.placed.storage[name] for name in names]
        cuts = [(own.layout, own.zero_axes) for own in storage]
        axes = axes_of_maxima(cuts, self.placed.shard_axes, self.placed.mesh)
        if names:
            yield self._record("parameter", "maxima", "all_reduce", "forward", axes, 4 * len(names), 1, (stage,))

    def _zero(self, unit: ZeroUnit) -> Iterator[Record]:
        order = [a for a in self.pipelining.orders()[self.pipelining.rank_of(unit.stage)] if a.stage == unit.stage]
        if not unit.has_backward:
            order = [action for action in order if action.kind == "F"]
        times = times_of(tuple(order), unit.zero_stage, reshards=unit.reshards)
        by_mesh: dict[tuple[int, ...], list[str]] = {}
        for name in unit.parameters:
            by_mesh.setdefault(self.placed.storage[name].zero_axes, []).append(name)
        for zero_axes, names in by_mesh.items():
            yield from self._together(unit, zero_axes, names, times)

    def _together(self, unit: ZeroUnit, zero_axes: tuple[int, ...], names: list[str], times: Times) -> Iterator[Record]:
        """What the parameters of a unit that are on one mesh cost."""
        placed, precision, stages = self.placed, self.placed.plan.precision, (unit.stage,)
        shard = tuple(axis for axis in zero_axes if axis in placed.shard_axes)
        across = tuple(axis for axis in zero_axes if axis not in placed.shard_axes)
        size, of = self._shards(zero_axes), unit.block or "shared parameters"
        values = {name: placed.analysis.names[name].meta["val"] for name in names}
        gathered = sum(
            size * self._shard_numel(n) * (1 if n in unit.narrow else itemsize_of(v.dtype, precision))
            for n, v in values.items()
        )
        wide = narrow_dtype(precision) is not None
        trained = sum(
            self._shard_numel(n) * (4 if wide else v.dtype.itemsize)
            for n, v in values.items()
            if n in placed.analysis.trained
        )
        if times.forward:
            yield self._record("parameter", of, "all_gather", "forward", shard, gathered, times.forward, stages)
        if times.backward:
            yield self._record("parameter", of, "all_gather", "backward", shard, gathered, times.backward, stages)
        if trained:
            scattered = size * trained, times.scattered
            yield self._record("gradient", of, "reduce_scatter", "backward", shard, *scattered, stages)
            if prod(placed.mesh.sizes[axis] for axis in across) > 1:
                yield self._record("gradient", of, "all_reduce", "backward", across, trained, 1, stages)

    def _record(
        self,
        cause: Cause,
        of: str,
        kind: str,
        phase: Phase,
        axes: tuple[int, ...],
        payload: float,
        times: int,
        stages: tuple[int, ...],
    ) -> Record:
        names = tuple(self.placed.mesh.names[axis] for axis in axes if self.placed.mesh.sizes[axis] > 1)
        return Record(
            cause=cause,
            of=of,
            kind=kind,
            phase=phase,
            axes=names if len(stages) == 1 else (PIPELINE_AXIS,),
            payload_bytes=float(payload),
            times=times,
            stages=stages,
        )
