"""One rank's running program: its stages, their parameters, and what sums their gradients."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.errors import InvalidInput, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.program import ParameterLayout, StageProgram
from autopar.runtime.accord import Accord
from autopar.runtime.agreement import agree
from autopar.runtime.blocks import CodeLibrary
from autopar.runtime.call_sizes import CallSizes, GivenSizes, SizeAgreement
from autopar.runtime.checkpoint.background import Background
from autopar.runtime.compiled import check_compiles
from autopar.runtime.disk.state import disk_state
from autopar.runtime.expert_load import sum_loads
from autopar.runtime.frozen_parameters import FrozenParameters
from autopar.runtime.fused_steps import register_fused_steps
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.inputs import Signature
from autopar.runtime.launch import this_device
from autopar.runtime.local_stage import LocalStage
from autopar.runtime.loss_scaler import LossScaler
from autopar.runtime.losses import loss_of_pipeline, start_sum
from autopar.runtime.maxima_histories import MaximaHistories
from autopar.runtime.mesh import JobMesh
from autopar.runtime.narrow_copies import NarrowCopies
from autopar.runtime.optimizer_settings import OptimizerSettings
from autopar.runtime.outputs import FirstOfBackward, scale_outputs
from autopar.runtime.parameters import blank_state, cut_axes, fill, make_meshes
from autopar.runtime.randomness import Randomness
from autopar.runtime.stage_module import StageModule
from autopar.runtime.state import Stored, load_full
from autopar.runtime.torch_private import at_end_of_backward
from autopar.runtime.variants import Programs, Results, Variant, Variants
from autopar.runtime.zero import ZeroEngine, apply_zero, zero_meshes

# What ranks say of themselves before each call.
_CALL, _OPTIMIZER, _GROUPS = "the call", "the optimizer", "the optimizer's settings on pipeline rank {}"


class Engine:
    """Built by all ranks together from the same plan and programs."""

    def __init__(
        self,
        model: nn.Module,
        captured: CapturedModel,
        plan: Plan,
        programs: Sequence[StageProgram],
        *,
        more: Programs | None = None,
        seed: int = 0,
        compile_blocks: bool = False,
        values: Mapping[str, torch.Tensor] | None = None,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        """programs: of every stage, of a training step in train mode; for a model without a loss, of a plain forward.

        more: makes the programs of plain forwards and of eval mode; called when they are needed.
        seed: the same on all ranks; of parameters that have no values yet and of the model's random ops.
        compile_blocks: with ``torch.compile``, each distinct block once.
        values: whole parameters and buffers that are not those of ``model``, by its names; lazy ones are read in part.
        disk: folder of what the plan keeps on a local disk.
        """
        self.captured, self.plan, self.device = captured, plan, this_device()
        register_fused_steps()
        if compile_blocks:
            check_compiles(plan)
        self.mesh = JobMesh.build(plan, self.device.type)
        self.mesh.make_groups(programs)
        make_meshes(programs, self.mesh)
        own = tuple(programs[stage] for stage in self.mesh.stages)
        self.program = program = own[-1]
        self._programs, self.signature = tuple(programs), Signature.of(captured, plan, model)
        self.state_order = tuple(model.state_dict(keep_vars=True))
        self.stages = {name: p.stage for p in reversed(programs) for name in (*p.held, *p.buffers)}
        self.layouts = {name: layout for part in own for name, layout in part.held.items()}
        # A buffer that no stage reads keeps its value on the first one.
        self.buffers = [
            buffer.name
            for buffer in captured.buffers.values()
            if self.mesh.holds(self.stages.get(buffer.name, 0)) or any(buffer.name in p.buffers for p in own)
        ]
        sharded = [zero_meshes(part, self.mesh) for part in own]
        later = {name for meshes in sharded for name in meshes}
        state = blank_state(model, self.layouts, self.buffers, cut_axes(programs), self.mesh, self.device, later)
        self.histories = MaximaHistories(own, self.mesh, self.device)
        state |= self.histories.tensors
        splits = plan.splits_backward
        self._library = CodeLibrary(self.mesh.group_names(), self.device, compile_blocks=compile_blocks, splits=splits)
        self.reducer = GradientReducer(self.device)
        self.local = tuple(self._local_stage(part, state) for part in own)
        for stage, meshes in zip(self.local, sharded, strict=True):
            stage.zero = self._apply_zero(stage, meshes)
        self.stored = {name: self._stored(name, layout) for name, layout in self.layouts.items()}
        self.disk = agree(lambda: disk_state(disk, self.local, self.stored, self.mesh, plan.prefetch))
        agree(lambda: fill(model, self.layouts, self.buffers, values or {}, self._put, seed))
        if self.disk is not None:
            self.disk.finish()
        self._reduce_gradients()
        self._copies = NarrowCopies([stage.module for stage in self.local], self.tensor)
        self.randomness = Randomness(seed, self.device)
        self._sizes = SizeAgreement(
            piece=self.mesh.piece(plan.inputs),
            pieces=plan.data_parallel_size,
            shared=plan.data_parallel_size < plan.num_ranks,
            num_microbatches=program.num_microbatches,
            planned=self.signature.planned,
        )
        subjects = (*map(_GROUPS.format, range(self.mesh.num_pipeline_ranks)), *self._sizes.subjects)
        self.accord = Accord((_CALL, _OPTIMIZER, *subjects), free=self._sizes.free)
        self.frozen = FrozenParameters(self._parameters_here, self.layouts)
        self._settings = OptimizerSettings(self._parameters_here)
        given = captured, plan, self.mesh, self.local, self.device, self.randomness, more
        self.variants = Variants(*given, compiled=compile_blocks)
        self.variants.add("loss" if captured.has_loss else "model", True, captured, programs)
        self.background, self._first_of_backward = Background(), FirstOfBackward()
        self.scaler: LossScaler | None = None
        self.losses: list[torch.Tensor] = []
        """This rank's partial sums of the last loss, one for each microbatch; none before the last stage."""
        # Made now, by all ranks together.
        self.pipeline = self.variants.steps(self.variants.get("loss", True)) if program.num_stages > 1 else None

    def _local_stage(self, program: StageProgram, state: Mapping[str, torch.Tensor]) -> LocalStage:
        """state: of all stages of this rank. What two of them read is one tensor in both; the first has the rest."""
        elsewhere = {name for stage in self.mesh.stages if stage != program.stage for name in self._names_of(stage)}
        read = self._names_of(program.stage)
        first = program.stage == self.mesh.stages[0]
        held = {n: value for n, value in state.items() if n in read or (first and n not in elsewhere)}
        return LocalStage(program, StageModule(program, self._library, held), self.reducer)

    def _names_of(self, stage: int) -> set[str]:
        return {*self._programs[stage].held, *self._programs[stage].buffers}

    # Parameters.

    @property
    def stage(self) -> StageModule:
        """The first stage of this rank; the only one without virtual stages."""
        return self.local[0].module

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of this rank called ``name``."""
        return next(stage.module.slot(name).get() for stage in self.local if stage.module.has(name))

    def reshard(self) -> None:
        """Put FSDP's sharded parameters back in place, if a forward left gathered ones."""
        for stage in self.local:
            stage.reshard()

    def _stored(self, name: str, layout: ParameterLayout) -> Stored:
        managed = any(stage.zero is not None and name in stage.zero.managed for stage in self.local)
        return Stored.of(layout, self.program.shard_axes, self.mesh) if managed else Stored(layout)

    def _apply_zero(self, stage: LocalStage, meshes: Mapping[str, DeviceMesh]) -> ZeroEngine | None:
        zero = apply_zero(
            stage.module,
            stage.program,
            self.mesh,
            self.plan,
            find=lambda name: stage.module.slot(name).get(),
            meshes=meshes,
        )
        if zero is not None:
            offload = self.plan.stages[stage.program.stage].offload
            slots = [stage.module.slot(name) for name in sorted(zero.managed)]
            zero.allocate(slots, torch.device("cpu") if offload else self.device)
        return zero

    def _put(self, name: str, whole: torch.Tensor) -> None:
        """Keep this rank's part of a parameter or buffer."""
        load_full(self.tensor(name), whole, name, self.stored.get(name), self.mesh)
        if self.disk is not None:
            self.disk.filled(name)

    def _reduce_gradients(self) -> None:
        for name, stored in sorted(self.stored.items()):
            parameter = self.tensor(name)
            if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
                continue
            here = [stage for stage in stored.layout.stages if self.mesh.holds(stage)]
            self.reducer.add(parameter, *stored.sums(self.mesh), here[0] if len(here) == 1 else None)

    def expert_load(self) -> dict[str, torch.Tensor]:
        """Layer -> tokens of the global batch that each of its experts got in the last call. All ranks together."""
        own = {stage.program.stage: stage.module.expert_loads for stage in self.local}
        return sum_loads(self._programs, own, self.mesh, self.device)

    def _begin(self) -> None:
        """Before the first backward of a call."""
        self.reducer.begin()
        if self.scaler is not None:
            self.local[-1].module.loss_scale = self.scaler.scale
            self.scaler.before_backward(self._gradients())

    def _finish(self, sizes: CallSizes | None = None) -> None:
        """After the last one."""
        self._copies.drop()
        self.histories.finish()
        if self.disk is not None:
            self.disk.finish()
        self.reducer.finish(in_any_order=sizes is not None and sizes.some_empty)
        if self.scaler is not None:
            self.scaler.after_backward(self._gradients(), self.device)

    def _update_buffers(self, variant: Variant) -> None:
        """Give the buffers that the stages wrote their new values, on every rank that has them."""
        new = {name: value for stage in self.local for name, value in stage.module.updates.items()}
        for name, stages in sorted(variant.updates.items()):
            group = self.mesh.group_over_stages(stages)
            if group is None or not any(map(self.mesh.holds, stages)):
                continue
            value = new[name].contiguous() if name in new else torch.empty_like(self.tensor(name))
            bits = value.view(torch.uint8) if value.dtype == torch.bool else value
            dist.broadcast(bits, src=self.mesh.rank_in_stage(stages[0]), group=group)
            new[name] = value
        for stage in self.local:
            stage.module.updates = {}
            for name, value in new.items():
                if stage.module.has(name):
                    # A new tensor in its place, not a copy into it: a backward may still need the old one.
                    slot = stage.module.slot(name)
                    slot.set(value.to(slot.get().dtype))

    def _gradients(self) -> list[torch.Tensor]:
        self.reshard()
        found = (self.tensor(name).grad for name in self.layouts)
        return [gradient for gradient in found if gradient is not None]

    def agree_to(self, call: str) -> None:
        """Before a call that all ranks make together: raise the same error on all of them if one differs."""
        self._agree_to(call, None, None, {})

    def agree_to_run(self, call: str, training: bool, failure: Exception | None, given: GivenSizes) -> CallSizes:
        """``agree_to`` a call that runs the model in a mode. failure: of this rank, raised on all. given: sizes of its
        inputs, the same on ranks with the same rows.
        """
        same = self._agree_to(call, training, failure, self._sizes.statements(given))
        return self._sizes.agreed(given, self.accord, same)

    def _agree_to(
        self, call: str, training: bool | None, failure: Exception | None, statements: Mapping[str, object]
    ) -> bool:
        """Optimisers are set alike on ranks of one stage, not of all. Returns whether what may differ is the same."""
        calls, mode = self.randomness.calls, "train" if training else "eval"
        when = f"after {calls} calls of the model" if training is None else f"number {calls + 1}, in {mode} mode"
        groups = _GROUPS.format(self.mesh.pipeline_rank)
        said = {_CALL: f"{call}, {when}", _OPTIMIZER: self._settings.made(), groups: self._settings.groups()}
        return self.accord.check({**said, **statements}, failure)

    def _parameters_here(self) -> dict[str, torch.Tensor]:
        self.reshard()
        return {name: self.tensor(name) for name in self.layouts}

    # Running programs of the stages.

    def variant(
        self,
        results: Results,
        training: bool,
        absent: frozenset[str] = frozenset(),
        sizes: CallSizes | None = None,
    ) -> Variant:
        """The program for a loss or for the model's outputs, in train or eval mode, without the step inputs ``absent``.

        sizes: None for those of the plan. Raises CaptureError or PlanMismatch, on every rank, if there is none.
        """
        if results == "loss" and not self.captured.has_loss:
            raise PlanMismatch(
                f"{self.captured.name} has no loss, so there is no training step.\n"
                "  try: parallelize(..., loss_fn=...), or labels among the example inputs"
            )
        if sizes is None or sizes.planned:
            return self.variants.get(results, training, absent)
        if sizes.even:
            return self.variants.get(results, training, absent, sizes)
        return self.variants.get_own(results, training, absent, sizes, self.accord)

    def _select(
        self, variant: Variant, inputs: Mapping[str, torch.Tensor], sizes: CallSizes | None
    ) -> list[dict[str, torch.Tensor]]:
        """Choose the programs that run; what they take, for each microbatch: step inputs, and sums over all of them."""
        given = self.variants.microbatches({name: inputs[name] for name in variant.inputs})
        values = variant.size_values(sizes, len(given))
        for stage in self.local:
            stage.module.set_sizes(values)
        for module, total, names in variant.totals:
            module.select(total)
            parts = []
            for number, microbatch in enumerate(given):
                module.begin(number)
                with torch.no_grad():
                    parts.append(module.forward(**microbatch))  # not through hooks: no parameter is read
            sums = {name: torch.stack(values).sum(0) for name, values in zip(names, zip(*parts), strict=True)}
            given = [{**microbatch, **sums} for microbatch in given]
        for stage in self.local:
            stage.begin(variant.name)
        return given

    # A training step.

    def step(
        self, inputs: Mapping[str, torch.Tensor], training: bool = True, sizes: CallSizes | None = None
    ) -> torch.Tensor:
        """Forward, backward and gradient sums over this rank's batch. Returns the loss of the global batch."""
        variant = self.variant("loss", training, sizes=sizes)
        self._check_gradients(variant)
        if self.scaler is None and self.plan.precision == "fp16":
            raise InvalidInput(
                "the plan computes in float16, whose small gradients vanish unless the loss is scaled.\n"
                "  try: scaler = autopar.LossScaler(pm), and scaler.step(optimizer); or a plan in bf16"
            )
        microbatches, partial_axes = self._select(variant, inputs, sizes), variant.programs[-1].loss_partial_axes
        for stage in self.local:
            stage.module.expert_loads = []
        self._begin()
        self._copies.make(variant.casts)
        self.randomness.next_call()
        self.losses = []
        if self.program.num_stages > 1:
            losses = self.losses = self.variants.steps(variant).step(microbatches)
            self._finish(sizes)
            self._update_buffers(variant)
            return loss_of_pipeline(losses, partial_axes, self.mesh, self.device)
        total: torch.Tensor | None = None
        summed: dist.Work | None = None
        for number, microbatch in enumerate(microbatches):
            self.stage.begin(number)
            with self.randomness.of(self.stage, number):
                (loss,) = self.stage(**microbatch)
            value = loss.detach()
            self.losses.append(value)
            total = value.clone() if total is None else total.add_(value)
            last = number == self.program.num_microbatches - 1
            if last:
                summed = start_sum(total, partial_axes, self.mesh)
            self.local[0].before_backward(last)
            loss.backward()
            del loss
        self._finish(sizes)
        self._update_buffers(variant)
        if summed is not None:
            summed.wait()
        assert total is not None
        return total

    # Forward alone.

    def forward(self, inputs: Mapping[str, torch.Tensor], training: bool = True, sizes: CallSizes | None = None) -> Any:
        """The model's output for this rank's rows, as the model would return it; differentiable without a pipeline."""
        variant = self.variant("model", training, self.signature.absent(inputs), sizes)
        outputs = variant.outputs
        assert outputs is not None, "of a plain forward"
        if self.program.num_stages > 1 and torch.is_grad_enabled():
            raise PlanMismatch(
                f"the plan has {self.program.num_stages} pipeline stages, through which a plain forward takes no "
                "gradients back.\n  try: step(...) to train; with torch.no_grad() to evaluate"
            )
        if torch.is_grad_enabled():
            self._check_gradients(variant)
        parts = self._run(variant, inputs, training, sizes)
        if self.program.num_stages > 1:
            results = outputs.merge(parts) if parts else outputs.blank(self.stage.sizes, self.device)
            results = self.variants.forwards(variant).share(results)
        else:
            results = outputs.merge(parts)
        if torch.is_grad_enabled():
            begins = partial(self._first_of_backward, self._begin_backward)
            results = scale_outputs(begins, outputs.gradient_scales, results)
        return outputs.as_returned(results)

    @torch.no_grad()
    def loss(
        self, inputs: Mapping[str, torch.Tensor], training: bool = True, sizes: CallSizes | None = None
    ) -> torch.Tensor:
        """The loss of the global batch, the same number on every rank, without gradients."""
        variant = self.variant("loss", training, sizes=sizes)
        losses = [loss for (loss,) in self._run(variant, inputs, training, sizes)]
        partial_axes = variant.programs[-1].loss_partial_axes
        if self.program.num_stages > 1:
            return loss_of_pipeline(losses, partial_axes, self.mesh, self.device)
        total = torch.stack(losses).sum(0)
        summed = start_sum(total, partial_axes, self.mesh)
        if summed is not None:
            summed.wait()
        return total

    def _run(
        self, variant: Variant, inputs: Mapping[str, torch.Tensor], training: bool, sizes: CallSizes | None
    ) -> list[tuple[torch.Tensor, ...]]:
        """Results of every microbatch; none on ranks without the last stage. In eval mode nothing is counted."""
        microbatches = self._select(variant, inputs, sizes)
        counts = [stage.module.expert_loads for stage in self.local]
        for stage in self.local:
            stage.module.expert_loads = []
        if training:
            self.randomness.next_call()
        else:
            self.randomness.next_evaluation()
        self._copies.make(variant.casts)
        for zero, modules in variant.elsewhere:
            zero.hold(modules)
        if self.program.num_stages > 1:
            parts = self.variants.forwards(variant).run(microbatches)
        else:
            parts = []
            for number, microbatch in enumerate(microbatches):
                self.stage.begin(number)
                with self.randomness.of(self.stage, number):
                    parts.append(self.stage(**microbatch))
        self._copies.drop()
        self._update_buffers(variant)
        if not training:
            for stage, count in zip(self.local, counts, strict=True):
                stage.module.expert_loads = count
        for zero, modules in variant.elsewhere:
            zero.release(modules)
        if not torch.is_grad_enabled():
            # No backward follows that would; what is gathered would be read again after the optimiser's step.
            self.reshard()
        return parts

    def _check_gradients(self, variant: Variant) -> None:
        if variant.elsewhere:
            raise PlanMismatch(
                f"in {variant.name.split()[0]} mode {self.captured.name} reads parameters in other blocks than those "
                "that ZeRO gathers them for, and gradients cannot go back there.\n"
                "  try: a plan with zero 0 to train in this mode; with torch.no_grad() to evaluate"
            )

    def _begin_backward(self) -> None:
        """Start of a backward through plain forward: sum gradients in it, as DistributedDataParallel does."""
        self._begin()
        self.local[0].before_backward(True)
        # FSDP queues its own final callback later in this backward; the reducer has to come after it.
        at_end_of_backward(self._queue_finish)

    def _queue_finish(self) -> None:
        at_end_of_backward(self._finish)
