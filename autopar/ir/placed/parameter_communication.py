"""Records of what parameters and their gradients cost: sums over ranks, and under ZeRO gathers and scatters.

ZeRO works in units: the parameters that one block alone reads, and those of a stage that several blocks read. Within a
unit parameters on one mesh travel together. How often a unit is gathered and its gradients are scattered follows from
its ZeRO stage and from the order of passes:

    ZeRO stage              gathered where it is not there      gone after             scattered after
    1                       before a pass                       the last backward      the last backward
    2                       before a pass                       the last backward      every backward
    3                       before a pass                       every backward         every backward
    3, resharded forward    before a pass                       every pass             every backward
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.gradient_flow import computed
from autopar.ir.graph import op_nodes, tensor_operands
from autopar.ir.lowered.inside import Phase
from autopar.ir.placed.operands import Operands
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.records import PIPELINE_AXIS, Cause, Record
from autopar.ir.placed.storage import zero_divides
from autopar.ir.placement import local_shape
from autopar.ir.precision import itemsize_of, narrow_dtype
from autopar.ir.schedule import Action, Pipelining


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
    there, forward, backward, scattered = False, 0, 0, 0
    ends = [number for number, action in enumerate(order) if action.kind in "BW"]
    for number, action in enumerate(order):
        if not there and action.kind != "W":
            forward, backward = forward + (action.kind == "F"), backward + (action.kind != "F")
        there = not (action.kind == "F" and reshards)
        if number in ends:
            last = number == ends[-1]
            there = not (last or zero_stage == 3)
            scattered += last or zero_stage >= 2
    return Times(forward, backward, scattered)


def parameter_communication(placed: PlacedModel, pipelining: Pipelining) -> tuple[Record, ...]:
    """Every collective over parameters and their gradients of a step under ``pipelining``."""
    return tuple(_Units(placed, pipelining).records())


class _Units:
    """The units of every stage."""

    def __init__(self, placed: PlacedModel, pipelining: Pipelining) -> None:
        self.placed, self.plan, self.pipelining = placed, placed.plan, pipelining
        self.readers: dict[str, set[int]] = {}
        # Blocks that a gradient comes back to, and what stages themselves hold.
        self.flowing = {PRELUDE, *map(placed.analysis.block_of, placed.analysis.flow)}
        operands, runs = Operands(placed=placed, results="loss"), computed(placed.captured)
        for user in op_nodes(placed.captured.graph):
            for position in range(len(tensor_operands(user)) if user in runs else 0):
                use = operands.of(user, position)
                if use.read is not None:
                    self.readers.setdefault(use.tensor.name, set()).add(use.read.block)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that read a parameter."""
        return tuple(sorted({0 if b == PRELUDE else self.plan.stage_of(b) for b in self.readers[name]}))

    def records(self) -> Iterator[Record]:
        units: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
        for name in self.readers:
            stages = self.stages_of(name)
            managed = self._is_divided(name, stages)
            yield from self._sums(name, stages, managed)
            for stage in stages if managed else ():
                block = self._unit(name, stage)
                units.setdefault((stage, block, self.placed.storage[name].zero_axes), []).append(name)
        for (stage, block, zero_axes), names in units.items():
            yield from self._zero(stage, block, zero_axes, names, self._last_unit(units, stage))

    @staticmethod
    def _last_unit(units: dict[tuple[int, int, tuple[int, ...]], list[str]], stage: int) -> int:
        return max((block for own, block, _ in units if own == stage), default=PRELUDE)

    def _unit(self, name: str, stage: int) -> int:
        """The block that alone reads a parameter in a stage; PRELUDE where several do."""
        own = [b for b in self.readers[name] if (0 if b == PRELUDE else self.plan.stage_of(b)) == stage]
        return own[0] if len(own) == 1 else PRELUDE

    def _kind(self, block: int) -> int:
        return self.placed.analysis.repetition.blocks[block].kind

    def _is_divided(self, name: str, stages: tuple[int, ...]) -> bool:
        """Whether ZeRO works on a parameter."""
        block = self._unit(name, stages[0])
        parameter = self.placed.captured.parameters[name]
        ranks = set(map(self.pipelining.rank_of, stages))
        if len(ranks) < len(stages):
            return False  # FSDP cannot have one in two stages of a rank
        mesh, axes = self.placed.mesh, self.placed.storage[name].zero_axes
        if prod(mesh.sizes[axis] for axis in axes if axis in self.placed.shard_axes) == 1:
            return False
        shared = len(stages) > 1 or block == PRELUDE
        zero_stage = self.plan.zero if shared else self.plan.zero_of(self._kind(block))
        return zero_divides(zero_stage, requires_grad=parameter.requires_grad, shape=self._shape(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        """Local shape of a parameter, before ZeRO."""
        node = self.placed.analysis.names[name]
        return tuple(local_shape(node.meta["val"].shape, self.placed.storage[name].layout, self.placed.mesh))

    def _sums(self, name: str, stages: tuple[int, ...], managed: bool) -> Iterator[Record]:
        placed, storage = self.placed, self.placed.storage[name]
        if name not in placed.analysis.trained:
            return
        itemsize = placed.analysis.names[name].meta["val"].dtype.itemsize
        numel = self._shard_numel(name) if managed else prod(self._shape(name))
        axes = tuple(a for a in storage.partial_axes if not (managed and a in storage.zero_axes))
        if prod(placed.mesh.sizes[axis] for axis in axes) > 1:
            # Stages of one rank share their copy.
            for stage in {self.pipelining.rank_of(stage): stage for stage in stages}.values():
                yield self._record("gradient", name, "all_reduce", "backward", axes, numel * itemsize, 1, (stage,))
        if len(set(map(self.pipelining.rank_of, stages))) > 1:
            yield self._record("gradient", name, "all_reduce", "backward", (), numel * itemsize, 1, stages)

    def _shard_numel(self, name: str) -> int:
        """Elements of the piece of a parameter that one rank has under ZeRO, padded to be as large as any."""
        shape, size = self._shape(name), self._shards(self.placed.storage[name].zero_axes)
        return -(-shape[0] // size) * prod(shape[1:])

    def _shards(self, zero_axes: tuple[int, ...]) -> int:
        return prod(self.placed.mesh.sizes[axis] for axis in zero_axes if axis in self.placed.shard_axes)

    def _zero(
        self, stage: int, block: int, zero_axes: tuple[int, ...], names: list[str], last_unit: int
    ) -> Iterator[Record]:
        placed, plan = self.placed, self.plan
        kind = None if block == PRELUDE else self._kind(block)
        zero_stage = plan.zero if kind is None else plan.zero_of(kind)
        # Backward begins with the last block, and what the stage itself owns is used until then.
        reshards = kind is not None and plan.reshards(kind) and block != last_unit
        order = [a for a in self.pipelining.orders()[self.pipelining.rank_of(stage)] if a.stage == stage]
        if block not in self.flowing:
            order = [action for action in order if action.kind == "F"]  # no gradient comes to its outputs
        times = times_of(tuple(order), zero_stage, reshards=reshards)
        shard = tuple(axis for axis in zero_axes if axis in placed.shard_axes)
        across = tuple(axis for axis in zero_axes if axis not in placed.shard_axes)
        size, of = self._shards(zero_axes), "shared parameters" if kind is None else plan.blocks[kind].name
        values = {name: placed.analysis.names[name].meta["val"] for name in names}
        gathered = sum(size * self._shard_numel(n) * itemsize_of(v.dtype, plan.precision) for n, v in values.items())
        wide = narrow_dtype(plan.precision) is not None
        trained = sum(
            self._shard_numel(n) * (4 if wide else v.dtype.itemsize)
            for n, v in values.items()
            if n in placed.analysis.trained
        )
        if times.forward:
            yield self._record("parameter", of, "all_gather", "forward", shard, gathered, times.forward, (stage,))
        if times.backward:
            yield self._record("parameter", of, "all_gather", "backward", shard, gathered, times.backward, (stage,))
        if trained:
            scattered = size * trained, times.scattered
            yield self._record("gradient", of, "reduce_scatter", "backward", shard, *scattered, (stage,))
            if prod(placed.mesh.sizes[axis] for axis in across) > 1:
                yield self._record("gradient", of, "all_reduce", "backward", across, trained, 1, (stage,))

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
