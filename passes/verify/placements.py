"""``verify-placements``: a proof that the programs of a plan compute the loss and the gradients of the model.

    x_1 = identity(x, group='tp', backward='all_reduce')    Replicate() on tp    its gradient: Partial(), then whole
    h = linear(x_1, up)                                     Shard(2) on tp       n on tp: gives x_1 a Partial() gradient
    y = linear(gelu(h), down)                               Partial() on tp      k on tp
    y_1 = all_reduce(y, group='tp', backward='none')        Replicate() on tp    its gradient: whole

It reads the programs of one rank of each stage (all ranks of a stage run the same one), how inputs, buffers and
parameters are stored, the captured model and the factor rules, which are proved by execution; nothing of the passes
that made the programs. Every value gets a type (``types``): the tensor of the model that it stands for, and its
placement on every axis and over the microbatches. Then every gradient gets one (``gradients``). What has no type is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.errors import UnprovenProgram
from autopar.ir.graph import CapturedModel
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Placement, Replicate
from autopar.ir.plan import Plan
from autopar.ir.precision import narrow_dtype
from autopar.ir.program import StageProgram, TensorSpec
from autopar.passes.verify.gradients import type_gradients
from autopar.passes.verify.parameters import check_layouts
from autopar.passes.verify.schedule import verify_schedule
from autopar.passes.verify.stages import Environment, StageTyper, Unplaced
from autopar.passes.verify.terms import Term
from autopar.passes.verify.types import TIME, WHOLE, Mistyped, Type, timed
from autopar.passes.verify.values import Value


def verify_placements(captured: CapturedModel, programs: Sequence[StageProgram], plan: Plan) -> None:
    """Prove that ``programs``, one for each stage of ``plan``, compute ``captured`` and its gradients, to their end.

    captured: on global shapes, what the programs have to equal: the model of which they were made, its experts limited
    where ``plan.expert_capacity`` limits them. Linear in the programs and in the actions of the schedule.
    Raises UnprovenProgram, naming the op, what placement was expected and which it has. That is a defect of autopar.
    """
    try:
        _Proof(captured, programs, plan).run()
        verify_schedule(plan.pipelining)
    except (Unplaced, Mistyped) as error:
        raise UnprovenProgram(
            f"{captured.name}: the partitioned program is not proved to train the model.\n  {error}\n"
            "  this is a defect of autopar, and nothing was run; please report it with the plan"
        ) from error


class _Proof:
    """The typing of all stages of one plan."""

    def __init__(self, captured: CapturedModel, programs: Sequence[StageProgram], plan: Plan) -> None:
        self.captured, self.programs = captured, programs
        self.mesh: Mesh = timed(plan.stage_mesh, plan.batch.num_microbatches)
        if [p.stage for p in programs] != list(range(plan.num_stages)):
            raise Mistyped(f"there are programs of stages {[p.stage for p in programs]}, not of all {plan.num_stages}")
        for program in programs:
            if program.mesh != plan.stage_mesh or program.num_microbatches != plan.batch.num_microbatches:
                raise Mistyped(f"stage {program.stage} is on another mesh, or of other microbatches, than the plan")
        self.stages = StageTyper(captured, self.mesh, narrow_dtype(plan.precision), check_layouts(captured, programs))

    def run(self) -> None:
        """Type values, then gradients. Raises Unplaced or Mistyped."""
        sent: list[tuple[TensorSpec, Value]] = []
        environments: list[Environment] = []
        for program in self.programs:
            environments.append(self.stages.stage(program, sent))
            sent = self.stages.sent(program, environments[-1])
        if sent:
            raise Mistyped("the last stage sends tensors that no stage receives")
        self._check_updates(environments)
        last, environment = self.programs[-1], environments[-1]
        if last.loss is not None:
            self._check_loss(last, environment)
        elif self._is_training:
            raise Mistyped("no stage gives the loss")
        else:
            self._check_outputs(last, environment)
        if last.loss is not None or (len(self.programs) == 1 and self.mesh.sizes[TIME] == 1):
            type_gradients(self.stages.calls, self.mesh)
            self._check_returned(environments)

    def _check_returned(self, environments: Sequence[Environment]) -> None:
        """A gradient that comes to what a stage has received is sent back."""
        for program, environment in zip(self.programs, environments, strict=True):
            for spec in program.received:
                if environment[spec.name].gradients and not spec.has_gradient:
                    raise Mistyped(
                        f"stage {program.stage} computes a gradient of {spec.name}, which it does not send back"
                    )

    @property
    def _is_training(self) -> bool:
        return not any(program.output_microbatches for program in self.programs)

    def _check_loss(self, program: StageProgram, environment: Environment) -> None:
        """The loss is that of the model, its parts add up to it, and each rank's gradient of it is 1."""
        loss = self.captured.loss_node()
        assert loss is not None and program.loss is not None
        partial = {1 + axis for axis in program.loss_partial_axes}
        in_time = self.mesh.sizes[TIME] > 1
        layout = tuple(
            Partial() if axis in partial or (axis == TIME and in_time) else Replicate()
            for axis in range(len(self.mesh))
        )
        self._claim(environment, program.loss, self.stages.typer.terms.of[loss], layout, "the loss", seed=True)

    def _check_outputs(self, program: StageProgram, environment: Environment) -> None:
        """What a plain forward hands out is what the model returns."""
        flat = self.captured.output_args()
        start = 1 if self.captured.has_loss else 0
        wanted = [v for v in flat[start : start + self.captured.num_outputs] if hasattr(v, "meta")]
        for node, name, layout, in_time in zip(
            wanted, program.outputs, program.output_layouts, program.output_microbatches, strict=True
        ):
            if name is None or layout is None:
                raise Mistyped(f"the last stage does not give {node.name}")
            term = self.stages.typer.terms.of[node]
            over_time = in_time if self.mesh.sizes[TIME] > 1 else Replicate()
            self._claim(environment, name, term, (over_time, *layout), f"output {name}", seed=True)

    def _check_updates(self, environments: Sequence[Environment]) -> None:
        """Every buffer that the model writes is written once, whole on every rank."""
        by_name = {node.name: node for node in self.captured.graph.nodes}
        updated = {b.name: b.updated_by for b in self.captured.buffers.values() if b.updated_by is not None}
        done = [name for program in self.programs for name in program.buffer_updates]
        if sorted(done) != sorted(updated):
            raise Mistyped(f"the stages update buffers {sorted(done)}, the model {sorted(updated)}")
        for program, environment in zip(self.programs, environments, strict=True):
            for name, value in program.buffer_updates.items():
                summed = name in program.summed_updates and self.mesh.sizes[TIME] > 1
                in_time: Placement = Partial() if summed else Replicate()
                layout = (in_time, *(Replicate() for _ in program.mesh.axes))
                term = self.stages.typer.terms.of[by_name[str(updated[name])]]
                self._claim(environment, value, term, layout, f"the new value of buffer {name}")

    def _claim(
        self, environment: Environment, name: str, term: Term, layout: Layout, what: str, *, seed: bool = False
    ) -> None:
        """A value has a type; seed: its gradient comes from outside, the same on all ranks that have the same of it."""
        value = environment.get(name)
        kinds = () if value is None else value.types
        for kind in kinds:
            if kind.term is term and kind.layout == layout and kind.scale == 1 and not kind.zigzag:
                if seed and value is not None:
                    value.gradients.append((kind, WHOLE, what))
                return
        got = "; ".join(kind.show(self.mesh) for kind in kinds) or "nothing"
        wanted = Type(term, layout).show(self.mesh)
        raise Mistyped(f"{what} is to be {wanted}; the stage has {name}, which is {got}")
