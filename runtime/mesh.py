"""The ranks of a job as a device mesh: ("pp", *axes of a stage), and the process groups over it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.ir.errors import InvalidPlan, PlanMismatch
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.primitives.group_communication import axes_of_group
from autopar.ir.program import ParameterLayout, StageProgram, update_stages
from autopar.ir.schedule import Pipelining
from autopar.runtime.narrow_gathers import axes_of_stage
from autopar.runtime.torch_private import beside, flattened

PIPELINE_AXIS = "pp"

_Made = dict[
    tuple[str, tuple[int, ...], tuple[str, ...]],
    tuple[DeviceMesh, dict[tuple[int, ...], dist.ProcessGroup | None], dict[str, str], dict[str, str]],
]
# What was made on the default group: device meshes by device type, sizes and names, with the groups over some of their
# stages by the ranks of the pipeline, the names of those that ops use, and of others of the same ranks. A mesh holds
# the group that it was made on, so what was made on earlier ones is dropped when there is another.
_MADE: dict[dist.ProcessGroup, _Made] = {}


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raise PlanMismatch unless the plan is for ``world_size`` ranks. The same on every rank; nothing is sent."""
    if PIPELINE_AXIS in plan.mesh:
        raise InvalidPlan(
            f"plan: mesh has an axis called {PIPELINE_AXIS!r}, which is the name of the pipeline axis.\n"
            "  expected: the axes inside one stage; the pipeline is the list of stages"
        )
    if plan.num_ranks == world_size:
        return
    stages = f"{plan.num_stages} stages" + (f", {plan.virtual_stages} a rank," if plan.virtual_stages > 1 else "")
    raise PlanMismatch(
        f"the plan is for {plan.num_ranks} ranks ({stages} of mesh {plan.stage_mesh}), this job has "
        f"{world_size}.\n  try: torchrun with {plan.num_ranks} processes in all, or search a plan for {world_size}"
    )


@dataclass(slots=True)
class JobMesh:
    """Where this rank stands among all ranks, and the groups that it shares with others.

    device_mesh: ("pp", *stage axes) over all ranks, the pipeline outermost. coordinates: of this rank on the
    axes of its stage mesh. Groups over several axes or stages are made once, by all ranks in the same order; models on
    equal meshes share them, since each holds threads or device memory for as long as the job runs.
    """

    device_mesh: DeviceMesh
    stage_mesh: Mesh
    pipelining: Pipelining
    pipeline_rank: int
    coordinates: tuple[int, ...]
    _over_stages: dict[tuple[int, ...], dist.ProcessGroup | None]
    _group_names: dict[str, str]
    _other_groups: dict[str, str]

    @classmethod
    def build(cls, plan: Plan, device_type: str) -> JobMesh:
        """The mesh of ``plan`` over all ranks of the default group. Raises PlanMismatch if they do not fit."""
        check_world_size(plan, dist.get_world_size())
        stage_mesh = plan.stage_mesh
        sizes, names = (plan.num_pipeline_ranks, *stage_mesh.sizes), (PIPELINE_AXIS, *stage_mesh.names)
        world = dist.group.WORLD
        assert world is not None, "the default group is there"
        for gone in _MADE.keys() - {world}:
            del _MADE[gone]
        made = _MADE.setdefault(world, {})
        if (device_type, sizes, names) not in made:
            made[device_type, sizes, names] = init_device_mesh(device_type, sizes, mesh_dim_names=names), {}, {}, {}
        device_mesh, over_stages, group_names, others = made[device_type, sizes, names]
        group_names.update((name, device_mesh.get_group(name).group_name) for name in stage_mesh.names)
        coordinates = device_mesh.get_coordinate()
        assert coordinates is not None, "every rank is in the mesh"
        place = coordinates[0], tuple(coordinates[1:])
        return cls(device_mesh, stage_mesh, plan.pipelining, *place, over_stages, group_names, others)

    def group_names(self) -> Mapping[str, str]:
        """Mesh axis of a stage, or several as ``joint_groups`` names them -> name of this rank's process group along
        them, as collectives in graphs want it. Of several, those that ``make_groups`` has made."""
        return self._group_names

    def other_groups(self) -> Mapping[str, str]:
        """Name of each group of ``group_names`` -> name of another one of the same ranks. Those that are not there yet
        are made; all ranks call together."""
        for axes in sorted(self._group_names.keys() - self._other_groups.keys()):
            over = [1 + self.stage_mesh.index(axis) for axis in axes_of_group(axes)]
            ranks = self.device_mesh.mesh
            rest = [dim for dim in range(ranks.ndim) if dim not in over]
            size = prod(ranks.shape[dim] for dim in over)
            for members in ranks.permute(*rest, *over).reshape(-1, size).tolist():
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    self._other_groups[axes] = group.group_name
        return {name: self._other_groups[axes] for axes, name in self._group_names.items()}

    def submesh(self, axes: Sequence[int]) -> DeviceMesh | None:
        """The mesh over some axes of this rank's stage; axes of size 1 are left out. None if none is left."""
        names = self._names(axes)
        return self.device_mesh[names] if names else None

    def joined(self, groups: Sequence[Sequence[int]]) -> DeviceMesh | None:
        """The mesh with one dimension for each group of axes of this rank's stage. Made by all ranks together at the
        first call."""
        if all(len(axes) == 1 for axes in groups):
            return self.submesh([axis for (axis,) in groups])
        found = [mesh for mesh in map(self.flat, groups) if mesh is not None]
        return beside(found) if len(found) > 1 else found[0] if found else None

    def flat(self, axes: Sequence[int]) -> DeviceMesh | None:
        """One-dimensional mesh over some axes of this rank's stage, the earlier axis the major one.

        Made by all ranks together at the first call.
        """
        submesh = self.submesh(axes)
        if submesh is None or submesh.ndim == 1:
            return submesh
        return flattened(submesh)

    def sharded(self, zero_axes: Sequence[int], shard_axes: Sequence[int]) -> DeviceMesh | None:
        """The mesh that FSDP shards a parameter over: those of ``shard_axes`` in ``zero_axes`` as one dimension, before
        it the others as one.

        One-dimensional where nothing replicates; of one rank where it shards over axes of size 1; None where nothing is
        sharded.
        """
        own = [axis for axis in zero_axes if axis in shard_axes]
        inside = self.flat(own)
        across = self.flat([axis for axis in zero_axes if axis not in shard_axes])
        if inside is None and own:
            return self.device_mesh[self.stage_mesh.names[own[0]]]
        return inside if inside is None or across is None else beside([across, inside])

    def group(self, axes: Sequence[int]) -> dist.ProcessGroup | None:
        """Process group over some axes of this rank's stage; None if it holds one rank."""
        flat = self.flat(axes)
        return None if flat is None else flat.get_group()

    def size(self, axes: Iterable[int]) -> int:
        """Ranks along axes of the stage mesh."""
        return prod(self.stage_mesh.sizes[axis] for axis in axes)

    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks at this rank's place in each stage."""
        return self.device_mesh.get_group(PIPELINE_AXIS)

    @property
    def num_pipeline_ranks(self) -> int:
        """Ranks along the pipeline."""
        return self.pipelining.num_ranks

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.pipelining.stages_of(self.pipeline_rank)

    def holds(self, stage: int) -> bool:
        """Whether this rank holds a stage."""
        return self.pipelining.rank_of(stage) == self.pipeline_rank

    def rank_in_stage(self, stage: int) -> int:
        """Global rank of the rank at this rank's place in ``stage``."""
        return dist.get_global_rank(self.pipeline_group(), self.pipelining.rank_of(stage))

    def group_over_stages(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The ranks at this rank's place in ``stages``, made by ``make_groups``; None if that is this rank alone."""
        ranks = self._pipeline_ranks(stages)
        if len(ranks) == 1:
            return None
        return self.pipeline_group() if len(ranks) == self.num_pipeline_ranks else self._over_stages[ranks]

    def _pipeline_ranks(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({self.pipelining.rank_of(stage) for stage in stages}))

    def make_groups(self, programs: Sequence[StageProgram], made_for: Sequence[StageProgram] | None = None) -> None:
        """Make every group that parameters and buffers of ``programs`` need. All ranks call it with all programs.

        made_for: the programs that the stages were made for, if ``programs`` are others that run on them.
        """
        layouts: list[ParameterLayout] = [layout for p in programs for layout in p.held.values()]
        for axes in sorted({layout.zero_axes for layout in layouts}):
            self.sharded(axes, programs[0].shard_axes)
        for summed, axes in sorted({(layout.partial_axes, layout.zero_axes) for layout in layouts}):
            self.flat(summed)
            self.flat(tuple(axis for axis in summed if axis not in axes))
        for name in sorted({name for program in programs for name in program.joint_groups}):
            over = [self.stage_mesh.index(axis) for axis in axes_of_group(name)]
            group = self.group(over) or self.device_mesh.get_group(self.stage_mesh.names[over[0]])
            self._group_names[name] = group.group_name
        for cut in sorted(set(map(axes_of_stage, programs))):
            self.flat(cut)
        if any(program.histories for program in programs):
            self.flat(range(len(self.stage_mesh)))
        shared = [*(layout.stages for layout in layouts), *update_stages(programs, made_for).values()]
        for holders in sorted({self._pipeline_ranks(stages) for stages in shared}):
            if not 1 < len(holders) < self.num_pipeline_ranks or holders in self._over_stages:
                continue
            self._over_stages[holders] = None
            for ranks in self.device_mesh.mesh.reshape(self.num_pipeline_ranks, -1).T[:, list(holders)].tolist():
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    self._over_stages[holders] = group

    def first_on(self, axes: Iterable[int]) -> bool:
        """Whether this rank is the first one along each of ``axes``."""
        return all(self.coordinates[axis] == 0 for axis in axes)

    def piece(self, inputs: Container[str]) -> int:
        """Number of this rank's piece of what is divided over the stage axes ``inputs``, the first being the major."""
        number = 0
        for axis, coordinate in zip(self.stage_mesh.axes, self.coordinates, strict=True):
            if axis.name in inputs:
                number = number * axis.size + coordinate
        return number

    def _names(self, axes: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.stage_mesh.names[axis] for axis in sorted(axes) if self.stage_mesh.sizes[axis] > 1)
