"""The programs that one rank can run over its parameters: training step or plain forward, in train or eval mode, with
all arguments or without some.

Parameters live in the modules of the rank's stages, once. A variant is the code that runs over them; the training step
is there from the start, every other is captured, partitioned and added when it is first needed, by all ranks together.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from autopar.ir.capture.symbols import BATCH
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.pairs import run_at_once
from autopar.ir.plan import Plan
from autopar.ir.primitives.collectives import groups_of
from autopar.ir.program import StageProgram, update_stages
from autopar.ir.program_sizes import FIXED, SizeValues
from autopar.runtime.accord import Accord
from autopar.runtime.agreement import agree
from autopar.runtime.blocks import BlockModule
from autopar.runtime.call_sizes import CallSizes, Sizes
from autopar.runtime.local_stage import LocalStage
from autopar.runtime.mesh import JobMesh
from autopar.runtime.narrow_copies import cast_reads
from autopar.runtime.narrow_gathers import read_otherwise
from autopar.runtime.outputs import Outputs
from autopar.runtime.randomness import Randomness
from autopar.runtime.stage_module import StageModule
from autopar.runtime.two_queues import BackwardThread
from autopar.runtime.zero import ZeroEngine

if TYPE_CHECKING:
    from autopar.runtime.forward_pipeline import ForwardPipeline
    from autopar.runtime.pipeline import Pipeline

Results = Literal["loss", "model"]
# What is wanted of the model, whether it is in train mode, and the keys of the step inputs that are not given.
_Mode = tuple[Results, bool, frozenset[str]]


class Programs(Protocol):
    """Makes programs when they are needed."""

    def programs(
        self, results: Results, training: bool, absent: frozenset[str], sizes: Sizes
    ) -> tuple[CapturedModel, Sequence[StageProgram]]:
        """The capture and the programs of every stage for what is wanted of the model, in train mode or not, without
        the step inputs of the keys ``absent``, and at other sizes than the plan's; for all sizes that divide as these
        do, where the model has symbols for them."""

    def uneven_obstacle(self, training: bool, absent: frozenset[str], varying: frozenset[str]) -> str | None:
        """Why microbatches, on one rank or on several, may not differ in the symbols ``varying``; None if they may."""


@dataclass(slots=True, kw_only=True)
class Variant:
    """One program of every stage of this rank.

    programs: of its stages. required: the step inputs that any stage takes, inputs: those of this rank's. casts: what
    is read in another dtype. totals: what runs on every microbatch before the first, as module, variant and names of
    the results. updates: buffers, with the stages that hold them, that which computes the new value first. outputs: of
    a plain forward. elsewhere: blocks whose parameters ZeRO shards and other blocks read. forwards: what runs it
    through a pipeline; steps: and its backward. at_once: whether the pairs of
    its schedule run at once.
    """

    name: str
    programs: tuple[StageProgram, ...]
    required: tuple[str, ...]
    inputs: tuple[str, ...]
    casts: dict[str, torch.dtype]
    totals: list[tuple[StageModule, str, tuple[str, ...]]]
    updates: dict[str, tuple[int, ...]]
    outputs: Outputs | None
    elsewhere: tuple[tuple[ZeroEngine, tuple[FSDPModule, ...]], ...]
    at_once: bool
    forwards: ForwardPipeline | None = None
    steps: Pipeline | None = None

    def fits(self, sizes: CallSizes) -> bool:
        """Whether it is for any sizes, and can run these."""
        own = self.programs[0].sizes
        return own is not None and sizes.fit(own)

    def size_values(self, sizes: CallSizes | None, num_microbatches: int) -> list[SizeValues]:
        """The numbers that its sizes are in each microbatch."""
        own = self.programs[0].sizes
        return [FIXED] * num_microbatches if own is None or sizes is None else sizes.values(own)


class Variants:
    """Finds or makes the variants of one rank."""

    def __init__(
        self,
        captured: CapturedModel,
        plan: Plan,
        mesh: JobMesh,
        local: Sequence[LocalStage],
        device: torch.device,
        randomness: Randomness,
        programs: Programs | None,
        *,
        compiled: bool = False,
    ) -> None:
        """captured: that of training. programs: makes those of variants that are not there yet. compiled: whether
        blocks are."""
        self._captured, self._plan, self._mesh, self._local = captured, plan, mesh, tuple(local)
        self._device, self._random, self._programs = device, randomness, programs
        self._two_queues = device.type == "cpu" and not compiled
        self._made: dict[tuple[_Mode, Sizes], Variant] = {}
        self._flexible: dict[_Mode, list[Variant]] = {}
        self._holders: Sequence[StageProgram] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._made)

    def get(
        self,
        results: Results,
        training: bool,
        absent: frozenset[str] = frozenset(),
        sizes: CallSizes | None = None,
    ) -> Variant:
        """The variant for a loss or for the model's outputs. All ranks call together where it is not made yet.

        absent: keys of the step inputs that are not given. sizes: of those that are, where they are not the plan's, the
        same on all ranks. Raises CaptureError, PlanMismatch or InvalidInput, on every rank, if there is none.
        """
        mode = results, training, absent
        found = self._found(mode, sizes)
        if found is None:
            captured, programs = agree(lambda: self._make(mode, self._of_batch(sizes)))
            self._mesh.make_groups(programs, self._holders)
            found = self.add(results, training, captured, programs, absent, self._of_batch(sizes))
        return found

    def get_own(
        self, results: Results, training: bool, absent: frozenset[str], sizes: CallSizes, accord: Accord
    ) -> Variant:
        """The variant of this rank's ``sizes``, where microbatches differ, or ranks. All ranks call together.

        Raises PlanMismatch, on every rank, if the results would depend on that, or the errors of ``get``.
        """
        mode = results, training, absent
        self.get(results, training, absent)  # whose process groups it shares
        failure: Exception | None = None
        found = self._found(mode, sizes)
        try:
            obstacle = None
            if self._programs is not None:
                obstacle = self._programs.uneven_obstacle(training, absent, sizes.varying)
            if obstacle is not None:
                raise PlanMismatch(
                    f"data-parallel ranks or microbatches have batches of different sizes, of which "
                    f"{self._captured.name} does not allow: {obstacle}.\n"
                    "  try: as many rows, of the same length, in each"
                )
            if found is None:
                own = self._of_batch(sizes)
                found = self.add(results, training, *self._make(mode, own), absent, own)
            if BATCH in sizes.varying and found.programs[0].sizes is None:
                # A number in it may come of a batch that is not that of all ranks.
                raise PlanMismatch(
                    f"data-parallel ranks or microbatches have other numbers of rows than others, and "
                    f"{self._captured.name} has programs for one batch size alone.\n  try: as many rows in each"
                )
        except Exception as error:  # the others wait for this rank's answer, whatever it is
            failure = error
        accord.check({}, failure)
        assert found is not None
        return found

    def _found(self, mode: _Mode, sizes: CallSizes | None) -> Variant | None:
        """The variant of a mode for ``sizes``, if it is made."""
        if sizes is None:
            return self._made.get((mode, ()))
        fitting = (variant for variant in self._flexible.get(mode, ()) if variant.fits(sizes))
        return next(fitting, None) or self._made.get((mode, self._of_batch(sizes)))

    def _of_batch(self, sizes: CallSizes | None) -> Sizes:
        return () if sizes is None else sizes.of_batch(self._plan.data_parallel_size)

    def _make(self, mode: _Mode, sizes: Sizes) -> tuple[CapturedModel, Sequence[StageProgram]]:
        results, training, absent = mode
        if self._programs is None:
            raise PlanMismatch(f"there is no program of the model's {results} in {_mode(training)} mode")
        # The random numbers of the caller go on as if nothing had been captured.
        with torch.random.fork_rng(devices=[]):
            return self._checked(*self._programs.programs(results, training, absent, sizes), training)

    def add(
        self,
        results: Results,
        training: bool,
        captured: CapturedModel,
        programs: Sequence[StageProgram],
        absent: frozenset[str] = frozenset(),
        sizes: Sizes = (),
    ) -> Variant:
        """Add a variant; the first one is what the stages were made for. programs: of every stage."""
        self._holders = self._holders or programs
        other = (*(f"without {key}" for key in sorted(absent)), *(f"{symbol} {size}" for symbol, size in sizes))
        name = " ".join((_mode(training), results, *other))
        own = tuple(programs[stage.program.stage] for stage in self._local)
        totals: list[tuple[StageModule, str, tuple[str, ...]]] = []
        for stage, program in zip(self._local, own, strict=True):
            handed = tuple(spec.name for spec in program.sent)
            if program.stage == program.num_stages - 1:
                handed = tuple(n for n in program.outputs if n is not None) if results == "model" else ()
                handed = (program.loss,) if program.loss is not None else handed
            stage.module.add_variant(name, program, handed, self._device)
            for number, block in enumerate(program.totals):
                alone = replace(program, blocks=(block,), received=(), buffer_updates={}, loss=None)
                stage.module.add_variant(f"{name} total {number}", alone, block.outputs, self._device)
                totals.append((stage.module, f"{name} total {number}", block.outputs))
        nodes = [node for program in programs for block in program.blocks for node in block.graph.nodes]
        managed = {name for stage in self._local if stage.zero is not None for name in stage.zero.managed}
        mode = results, training, absent
        variant = self._made[mode, sizes] = Variant(
            name=name,
            programs=own,
            required=tuple(dict.fromkeys(given for program in programs for given in program.inputs)),
            inputs=tuple(dict.fromkeys(given for program in own for given in program.inputs)),
            # FSDP casts what it manages.
            casts={read: dtype for read, dtype in cast_reads(own).items() if read not in managed},
            totals=totals,
            updates=update_stages(programs, self._holders),
            outputs=Outputs.of(captured, programs[-1], self._plan) if results == "model" else None,
            elsewhere=tuple(
                (stage.zero, modules)
                for stage in self._local
                if stage.zero is not None and (modules := _elsewhere(stage, stage.zero.managed, programs))
            ),
            at_once=run_at_once(
                self._plan.pipelining,
                able=self._two_queues,
                zero=max(map(self._plan.zero_of, range(len(self._plan.blocks)))),
                on_host=self._plan.uses_host,
                communicates=any(map(groups_of, nodes)),
                nodes=nodes,
            ),
        )
        if programs[0].sizes is not None:
            self._flexible.setdefault(mode, []).append(variant)
        return variant

    def forwards(self, variant: Variant) -> ForwardPipeline:
        """The pipeline that runs forwards of a variant, without gradients."""
        if variant.forwards is None:
            # Importing it imports torch.export, which takes seconds.
            from autopar.runtime.forward_pipeline import ForwardPipeline

            variant.forwards = ForwardPipeline(
                [(program, stage.module) for program, stage in zip(variant.programs, self._local, strict=True)],
                self._plan.pipelining,
                group=self._mesh.pipeline_group(),
                device=self._device,
                randomness=self._random,
            )
        return variant.forwards

    def steps(self, variant: Variant) -> Pipeline:
        """The pipeline that runs training steps of a variant in the order of the plan's schedule."""
        if variant.steps is None:
            from autopar.runtime.pipeline import Pipeline

            variant.steps = Pipeline(
                [replace(stage, program=p) for p, stage in zip(variant.programs, self._local, strict=True)],
                self._plan.pipelining,
                group=self._mesh.pipeline_group(),
                device=self._device,
                randomness=self._random,
                # The groups are made by all ranks together, at the first time.
                backwards=BackwardThread(self._mesh.other_groups()) if variant.at_once else None,
            )
        return variant.steps

    def microbatches(self, inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The step inputs of each microbatch: of rows that do not divide, the first ones have one more."""
        count = self._plan.batch.num_microbatches
        batches: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, value in inputs.items():
            dim = self._captured.inputs[name].batch_dim
            parts = [value] * count if dim is None else value.tensor_split(count, dim)
            for batch, part in zip(batches, parts, strict=True):
                batch[name] = part
        return batches

    def _checked(
        self, captured: CapturedModel, programs: Sequence[StageProgram], training: bool
    ) -> tuple[CapturedModel, Sequence[StageProgram]]:
        """Raise PlanMismatch if a program reads parameters on stages that do not hold them."""
        for stage in self._local:
            program = programs[stage.program.stage]
            for name, _ in _reads(program):
                if not stage.module.has(name):
                    raise PlanMismatch(
                        f"in {_mode(training)} mode {captured.name} reads {name} on stage {program.stage} of the "
                        "pipeline, which does not hold it: in train mode it is read elsewhere, or not at all.\n"
                        "  try: pp=1, or evaluate the plain model of full_state_dict()"
                    )
            narrow = stage.zero.narrow if stage.zero is not None else None
            if narrow is not None and (read := read_otherwise(program, narrow.names)) is not None:
                raise PlanMismatch(
                    f"in {_mode(training)} mode {captured.name} reads {read} otherwise than in training, where it is "
                    "the weight of a product in 8-bit floats: ZeRO gathers it in 8 bits.\n"
                    "  expected: a product by the same recipe\n  try: a plan without a recipe for that layer"
                )
        return captured, programs


def _reads(program: StageProgram) -> list[tuple[str, str | None]]:
    """Parameters and buffers that a stage reads, with the block that does; None if several do."""
    alone = [(name, block.name) for block in program.blocks for name in (*block.parameters, *block.buffers)]
    return alone + [(name, None) for name in (*program.shared_parameters, *program.shared_buffers)]


def _elsewhere(stage: LocalStage, managed: Container[str], programs: Sequence[StageProgram]) -> tuple[FSDPModule, ...]:
    """The blocks of a stage of whose sharded parameters another block reads some. managed: names of these."""
    found: dict[FSDPModule, None] = {}
    for name, block in _reads(programs[stage.program.stage]):
        owner = stage.module.owner(name)
        if name in managed and isinstance(owner, BlockModule) and owner.name != block:
            assert isinstance(owner, FSDPModule), "what ZeRO manages"
            found[owner] = None
    return tuple(found)


def _mode(training: bool) -> str:
    return "train" if training else "eval"
