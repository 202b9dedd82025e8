"""ZeRO over the data axes through FSDP2.

    stage   parameters between uses     gradients reduce-scattered
    1       gathered for a whole step   once a step
    2       gathered for a whole step   every microbatch
    3       sharded, gathered per block every microbatch

Each block may have a ZeRO stage of its own; parameters that several blocks share have the plan's. At stage 3 a block
may also hold its parameters from forward to backward (``reshard_after_forward: false``). A frozen parameter, which has
no gradient and no optimiser state, is sharded at stage 3 alone.

Optimiser state is sharded at every stage, as the optimiser sees sharded parameters. Gradients are summed, not
averaged: the captured loss already is a mean over the global batch.

Experts that have a mesh axis of their own are divided there already; dense ops, whose tokens that axis divides, have
their parameters sharded over it too. One block then has parameters on several meshes.

Hybrid sharding (HSDP) shards over some data axes, within a node say, and replicates the shards over the others:
gradients reduce-scattered inside are all-reduced across, once a step at every stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar.ir.errors import PlanMismatch
from autopar.ir.placed.storage import zero_dim
from autopar.ir.plan import Plan
from autopar.ir.precision import narrow_dtype
from autopar.ir.primitives.read_parameter import local_of
from autopar.ir.program import StageProgram
from autopar.ir.torch_private import local_tensor, placed, placement_of
from autopar.runtime.blocks import BlockModule, Slot
from autopar.runtime.mesh import JobMesh
from autopar.runtime.narrow_gathers import NarrowGathers, axes_of_stage, narrow_names
from autopar.runtime.stage_module import StageModule
from autopar.runtime.torch_private import (
    adopt_parameters,
    end_backward,
    finish_gathering,
    prepare_sharding,
    reduce_gradients,
    shard_placements,
)


def zero_meshes(program: StageProgram, mesh: JobMesh) -> dict[str, DeviceMesh]:
    """Parameters of the units of ``program``, with the mesh that FSDP shards each over."""
    found = {}
    for unit in program.zero_units:
        for parameter in unit.parameters.values():
            own = mesh.sharded(program.parameters[parameter.name].zero_axes, program.shard_axes)
            assert own is not None, "a unit has parameters of several data ranks"
            found[parameter.name] = own
    return found


@dataclass(slots=True)
class ZeroEngine:
    """FSDP2 over the blocks of a stage, told before each backward whether it is the last of the step.

    modules: with their ZeRO stages; the root, which holds parameters that several blocks share, comes last. managed:
    names of the parameters in them. reshards: whether each reshards its parameters after its forward. narrow: those
    that are gathered in 8 bits. on_disk: modules whose parts are in files on a local disk, in order.
    """

    modules: list[tuple[FSDPModule, int]]
    managed: frozenset[str]
    reshards: dict[FSDPModule, bool]
    narrow: NarrowGathers | None = None
    on_disk: tuple[FSDPModule, ...] = ()
    before_sum: Callable[[FSDPModule], None] = lambda _: None
    """Called before the gradients of a module are summed after a split backward."""
    _last: bool | None = None

    @property
    def root(self) -> FSDPModule:
        """The outermost module, which holds parameters that several blocks share."""
        return self.modules[-1][0]

    def begin(self) -> None:
        """A call begins. All ranks of the stage together, with sharded parameters in place."""
        if self.narrow is not None:
            self.reshard()
            self.narrow.agree()

    def reshard(self) -> None:
        """Put the sharded parameters in place; prefetched parameters of a block that did not run are dropped."""
        for module, _ in self.modules:
            finish_gathering(module)
            module.reshard()

    def hold(self, modules: Iterable[FSDPModule]) -> None:
        """Gather the parameters of ``modules`` now, and hold them until ``release``, for other modules that read
        them."""
        prepare_sharding(self.root)
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def release(self, modules: Iterable[FSDPModule]) -> None:
        """Reshard parameters after the forward of ``modules`` as before ``hold``."""
        for module in modules:
            module.set_reshard_after_forward(self.reshards[module], recurse=False)
            module.reshard()

    def allocate(self, slots: Iterable[Slot], device: torch.device) -> None:
        """Give memory on ``device`` to this rank's parts of parameters, which were sharded on the meta device."""
        for slot in slots:
            old = slot.get()
            assert isinstance(old, DTensor), "what FSDP has sharded"
            if not local_tensor(old).is_meta:
                continue  # a fake tensor
            part = placed(torch.empty_like(local_tensor(old), device=device), placement_of(old))
            slot.set(nn.Parameter(part, requires_grad=old.requires_grad))
        with torch.no_grad():
            for module, _ in self.modules:
                adopt_parameters(module)

    def before_backward(self, last: bool) -> None:
        """A backward follows. last: of the step, so that gradients are reduced and parameters resharded."""
        if self._last is last:
            return
        self._last = last
        self.root.set_is_last_backward(last)
        for module, zero_stage in self.modules:
            module.set_requires_gradient_sync(last or zero_stage >= 2, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)
            module.set_reshard_after_backward(last or zero_stage >= 3, recurse=False)

    def sums(self, module: FSDPModule) -> bool:
        """Whether the backward that runs sums a module's gradients over ranks, and adds them to what is there."""
        return self._last is not None and (self._last or dict(self.modules)[module] >= 2)

    def before_inputs(self) -> None:
        """Backward to the inputs alone: there is nothing to sum. The weights' part reads no parameter."""
        self._last = None
        self.root.set_is_last_backward(False)
        for module, zero_stage in self.modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(zero_stage >= 3, recurse=False)
            module.set_unshard_in_backward(True)

    def before_weights(self) -> None:
        """The rest of such a backward, which begins in the midst of blocks: no parameter is gathered for it."""
        for module, _ in self.modules:
            module.set_unshard_in_backward(False)

    def after_weights(self, last: bool) -> None:
        """End of a split backward, which FSDP cannot see: its hooks are on the way to the inputs."""
        self._last = None
        self.before_backward(last)
        for module, _ in self.modules:
            module.set_unshard_in_backward(True)
            self.before_sum(module)
            reduce_gradients(module)
        if last:
            end_backward(self.root)


def apply_zero(
    stage: StageModule,
    program: StageProgram,
    mesh: JobMesh,
    plan: Plan,
    find: Callable[[str], torch.Tensor],
    meshes: Mapping[str, DeviceMesh],
) -> ZeroEngine | None:
    """Shard the units of ``program``, the parameters of ``stage``, each over its data axes; None if there are none.

    find: gives a parameter by name. meshes: what to shard and over which mesh (``zero_meshes``); these parameters
    are on the meta device, and are until ``ZeroEngine.allocate``.
    """
    # FSDP warns when a block returns a view, since an in-place op on it would drop FSDP's hook. Graphs of
    # blocks are functional.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    if not meshes:
        return None
    managed = {find(name) for name in meshes}
    ignored = {parameter for parameter in stage.parameters() if parameter not in managed}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    narrow = narrow_dtype(plan.precision)
    if narrow is not None:
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Copies from pinned memory overlap with compute; pinning needs a GPU.
    policies = {False: OffloadPolicy(), True: OffloadPolicy()}
    if plan.stages[program.stage].offload:
        pins = mesh.device_mesh.device_type != "cpu"
        policies = {False: CPUOffloadPolicy(pin_memory=pins), True: CPUOffloadPolicy(pin_memory=False)}
    widest = max(meshes.values(), key=lambda own: own.size())
    placed = _placements({find(name): own for name, own in meshes.items()}, widest)
    modules: list[tuple[FSDPModule, int]] = []
    reshards: dict[FSDPModule, bool] = {}
    on_disk: list[FSDPModule] = []
    blocks = {block.name: block for block in stage.blocks if isinstance(block, BlockModule)}
    for unit in program.zero_units:
        module = stage if unit.block is None else blocks[unit.block]
        fully_shard(
            module,
            mesh=widest,
            reshard_after_forward=unit.reshards,
            shard_placement_fn=placed,
            mp_policy=policy,
            offload_policy=policies[unit.on_disk],
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        # Sums instead of averages, without a scaling pass.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        modules.append((module, unit.zero_stage))
        reshards[module] = unit.reshards
        if unit.on_disk and unit.parameters:
            on_disk.append(module)
    # No gradient goes further back than the first parameter that has one.
    frozen = next(number for number, unit in enumerate(program.zero_units) if unit.has_backward)
    _prefetch([module for module, _ in modules], plan.prefetch, frozen)
    gathers = None
    if names := narrow_names(program):
        gathers = NarrowGathers(names, find, narrow, mesh.group(axes_of_stage(program)))
    return ZeroEngine(modules, frozenset(meshes), reshards, gathers, tuple(on_disk))


def _placements(meshes: Mapping[torch.Tensor, DeviceMesh], usual: DeviceMesh) -> Callable[[nn.Parameter], Any] | None:
    """How FSDP shards each parameter: over which mesh, along which dimension; None where that is the first dimension
    over ``usual`` for all of them."""
    wanted = {
        parameter: (own, zero_dim(local_of(parameter).shape, own.size(own.ndim - 1)))
        for parameter, own in meshes.items()
    }
    if all(own == usual for own in meshes.values()):
        along = {parameter: Shard(dim) for parameter, (_, dim) in wanted.items() if dim}
        return along.get if along else None
    try:
        placements = shard_placements(list(dict.fromkeys(wanted.values())))
    except ImportError as error:
        raise PlanMismatch(
            "shard_axes: experts have a mesh axis of their own, and ZeRO works over that axis and another, so that a "
            f"block's parameters are on two meshes; torch {torch.__version__} shards them over one.\n"
            "  try: torch 2.12 or later, or one of the axes in shard_axes"
        ) from error
    return lambda parameter: placements[wanted[parameter]]


def _prefetch(modules: list[FSDPModule], count: int, frozen: int) -> None:
    """Gather the next ``count`` blocks while one runs. The first ``frozen`` ones have no backward.

    Left to itself FSDP gathers backward's blocks in the reverse order of all forwards since the last step, and so ends
    the backward of every microbatch but one by gathering the last block once more. A block that is there already is
    not gathered again, so the first one names itself. So does the root: it would gather the last block whenever the
    gradient of one more output of the stage is there, and an output of an early block has its gradient late, when the
    last block is done.
    """
    *blocks, root = modules
    root.set_modules_to_forward_prefetch(blocks[:count])
    root.set_modules_to_backward_prefetch([root])
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + count])
        block.set_modules_to_backward_prefetch(blocks[max(frozen, number - count) : number][::-1] or [block])
