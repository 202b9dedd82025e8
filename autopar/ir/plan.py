"""The plan: one YAML file that says how a model is trained on a cluster.

A person can read, edit and commit it. Loading validates it and names the path of a bad field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
import yaml
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt

from autopar.ir import plan_page
from autopar.ir.bounded_text import bad_fields, parse_yaml, read_text
from autopar.ir.errors import InvalidPlan
from autopar.ir.kept_lists import check_lists
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.ops.scalings import Recipe as Recipe
from autopar.ir.predictions import LengthsPrediction as LengthsPrediction
from autopar.ir.predictions import Prediction as Prediction
from autopar.ir.predictions import strict
from autopar.ir.rematerialisation import LEVELS
from autopar.ir.schedule import Pipelining, Schedule
from autopar.ir.sequence import SequenceLayout
from autopar.ir.stage_plan import PassesPlan as PassesPlan
from autopar.ir.stage_plan import StagePlan as StagePlan

# Of compute.
Precision = Literal["fp32", "bf16", "fp16"]


# More than there are of any job, and little enough for tables with an entry each.
_MOST_RANKS = 1 << 20
_Ranks = Annotated[int, Field(gt=0, le=_MOST_RANKS)]
_MOST_BLOCKS = 1 << 14
_Blocks = Annotated[int, Field(gt=0, le=_MOST_BLOCKS)]
_Samples = Annotated[int, Field(gt=0, le=1 << 40)]
_Microbatches = Annotated[int, Field(gt=0, le=1 << 20)]


class _Model(BaseModel):
    model_config = strict


class ModelRef(_Model):
    """The model that the plan was made for.

    source, seq: MODEL and --seq of the command line that made the plan, for commands that need the model again.
    """

    name: str
    fingerprint: str
    source: str | None = None
    seq: PositiveInt | None = None


class ClusterRef(_Model):
    """The cluster that the plan was made for.

    stack: the software whose kernels it was predicted with. shares_nodes_of: devices that a node has, where it was
    assumed to give ``gpus_per_node`` of them to the job.
    """

    gpu: str
    num_gpus: _Ranks
    gpus_per_node: _Ranks
    stack: str = "autopar"
    shares_nodes_of: PositiveInt | None = None


class Batch(_Model):
    """global_size: samples a step over all ranks; num_microbatches: pieces it is cut into."""

    global_size: _Samples
    num_microbatches: _Microbatches = 1


class BlockPlan(_Model):
    """One distinct block.

    ops: key of an op -> mesh axis -> the factor sharded on it. An op or axis that is left out is replicated.
    Ops that only follow another (views, pointwise ops after one operand) have no entry.
    recipes: key of an op -> recipe of 8-bit floats of its matrix products. The other ops are in the plan's precision.
    kept: name -> what such a block keeps for its backward where ``remat`` of a stage has the name: results of ops, by
    key, and, as ``key(0)``, operands of ops as they read them after a redistribution, by number. What else is needed is
    computed again. A kind of block without a set of that name keeps everything.
    host: name -> what of that set, and ``inputs`` for the block's own, waits in host memory for the backward.
    zero, reshard_after_forward: of the parameters that only this block uses, instead of the plan's.
    """

    name: str
    repeats: _Blocks = 1
    ops: dict[str, dict[str, Annotated[str, Field(min_length=1)]]] = {}
    recipes: dict[str, Recipe] = {}
    kept: dict[str, list[str]] = {}
    host: dict[str, list[str]] | None = None
    zero: Annotated[int, Field(ge=0, le=3)] | None = None
    reshard_after_forward: bool | None = None


class Plan(_Model):
    """How one model is trained on one cluster.

    mesh: axis name -> size, outermost first; the axes of every stage. The pipeline is ``stages``.
    schedule, virtual_stages: of the pipeline; ``virtual_stages`` of the stages are on each of its ranks. passes: of
        schedule ``found``.
    inputs: mesh axes over which the rows of each step input are divided (the data-parallel ranks).
    zero: ZeRO stage over the data axes (axes on which every parameter is replicated). shard_axes: the data axes that
        it shards over; the others replicate the shards (hybrid sharding). None: all of them.
    prefetch: blocks gathered ahead of the one that runs, at ZeRO-3. reshard_after_forward: whether ZeRO-3
        reshards gathered parameters after the forward of a block, to gather them again for its backward.
    sequence_layout: order of the sequence where ranks share it. "zigzag" gives each rank one chunk of the first half
        and one of the second, so that causal attention is equal work for all (``autopar.ir.sequence``); of rows of
        packed documents, chunks that are so for the documents at hand (``autopar.ir.packed_order``).
    expert_capacity: most rows that an expert takes of a microbatch, as a multiple of an even share; tokens beyond it
        pass it by. None: every expert takes all that is sent to it.
    params: parameters that are stored otherwise than their first user needs them: name -> axis -> tensor
        dimension.
    """

    format: Literal[1] = 1
    model: ModelRef
    cluster: ClusterRef
    batch: Batch
    mesh: dict[str, _Ranks]
    inputs: list[str] = []
    schedule: Schedule = "1f1b"
    virtual_stages: PositiveInt = 1
    passes: PassesPlan | None = None
    sequence_layout: SequenceLayout = "contiguous"
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    shard_axes: list[str] | None = None
    prefetch: PositiveInt = 1
    reshard_after_forward: bool = True
    precision: Precision = "fp32"
    expert_capacity: PositiveFloat | None = None
    blocks: list[BlockPlan]
    stages: list[StagePlan]
    prediction: Prediction | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.stages)

    @property
    def stage_mesh(self) -> Mesh:
        """Mesh of the ranks of one place in the pipeline."""
        return Mesh(tuple(MeshAxis(name, size) for name, size in self.mesh.items()))

    @property
    def data_parallel_size(self) -> int:
        """Ranks over which a microbatch is divided."""
        size = 1
        for name in self.inputs:
            size *= self.mesh[name]
        return size

    @property
    def planned_rows(self) -> int:
        """The samples of a step if all microbatches of all ranks were as large as the largest: what memory, times and
        programs are worked out for. ``batch.global_size``, or the next number that divides."""
        pieces = self.batch.num_microbatches * self.data_parallel_size
        return -(-self.batch.global_size // pieces) * pieces

    @property
    def precision_words(self) -> str:
        """The precision of compute, and how many products are in 8-bit floats: ``bf16 + fp8-row (224 products)``."""
        counts: dict[Recipe, int] = {}
        for block in self.blocks:
            for recipe in block.recipes.values():
                counts[recipe] = counts.get(recipe, 0) + block.repeats
        return self.precision + "".join(f" + {recipe} ({count} products)" for recipe, count in counts.items())

    def stage_of(self, block: int) -> int:
        """The stage that runs block number ``block``, counted over all block instances."""
        return next(number for number, stage in enumerate(self.stages) if stage.first <= block <= stage.last)

    def remat_of(self, block: int) -> str:
        """Level of rematerialisation of block number ``block``, or name of the set that it keeps."""
        stage = self.stages[self.stage_of(block)]
        return stage.remat_of(block - stage.first)

    @property
    def uses_host(self) -> bool:
        """Whether activations of some block wait in host memory."""
        return any(block.host and block.host.get(name) for block in self.blocks for name in self.kept_sets)

    @property
    def kept_sets(self) -> tuple[str, ...]:
        """Names of the sets of tensors that blocks keep."""
        used = (name for stage in self.stages for name, count in stage.remat.items() if count)
        return tuple(dict.fromkeys(name for name in used if name not in LEVELS))

    def in_levels(self) -> Plan:
        """The plan with level full in place of sets of tensors that blocks keep, for software that has levels alone."""
        if not self.kept_sets:
            return self
        stages = []
        for stage in self.stages:
            levels = {name: count for name, count in stage.remat.items() if name in LEVELS}
            sets = sum(stage.remat.values()) - sum(levels.values())
            levels["full"] = levels.get("full", 0) + sets
            stages.append(stage.model_copy(update={"remat": levels}))
        blocks = [block.model_copy(update={"kept": {}, "host": None}) for block in self.blocks]
        return self.model_copy(update={"stages": stages, "blocks": blocks})

    def zero_of(self, kind: int) -> int:
        """ZeRO stage of the blocks of a kind."""
        own = self.blocks[kind].zero
        return self.zero if own is None else own

    def reshards(self, kind: int) -> bool:
        """Whether the blocks of a kind reshard gathered parameters after their forward."""
        own = self.blocks[kind].reshard_after_forward
        return self.zero_of(kind) == 3 and (self.reshard_after_forward if own is None else own)

    @property
    def num_pipeline_ranks(self) -> int:
        """Ranks along the pipeline."""
        return self.num_stages // self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether a backward is an input-gradient and a weight-gradient pass: of a pipeline whose schedule has both."""
        return self.num_stages > 1 and self.pipelining.splits_backward

    @property
    def pipelining(self) -> Pipelining:
        """The schedule, by ranks of the pipeline."""
        return Pipelining(
            self.schedule,
            self.num_pipeline_ranks,
            self.batch.num_microbatches,
            virtual_stages=self.virtual_stages,
            passes=None if self.passes is None else self.passes.times,
            turns=self.passes is not None and self.passes.placement == "v",
        )

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return self.num_pipeline_ranks * self.stage_mesh.size

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Plan:
        for name in self.inputs:
            if name not in self.mesh:
                raise ValueError(f"inputs: {name!r} is not a mesh axis; the mesh has {list(self.mesh)}")
        self._check_zero()
        expected = 0
        for number, stage in enumerate(self.stages):
            if stage.first != expected or stage.last < stage.first:
                raise ValueError(
                    f"stages.{number}: blocks {stage.first} to {stage.last}, expected a range that starts at "
                    f"{expected}; stages cover the blocks in order, without gaps"
                )
            expected = stage.last + 1
        blocks = sum(block.repeats for block in self.blocks)
        if expected != blocks:
            raise ValueError(f"stages: they end at block {expected - 1}, but there are {blocks} blocks")
        for block in self.blocks:
            for key, axes in block.ops.items():
                for axis in axes:
                    if axis not in self.mesh:
                        raise ValueError(
                            f"blocks: op {key!r} of {block.name!r} names mesh axis {axis!r}; "
                            f"the mesh has {list(self.mesh)}"
                        )
        self._check_rematerialisation()
        self._check_schedule()
        self._check_prediction()
        self._check_ranks()
        if self.batch.global_size < self.batch.num_microbatches * self.data_parallel_size:
            raise ValueError(
                f"batch: {self.batch.global_size} samples are too few for {self.batch.num_microbatches} "
                f"microbatches on {self.data_parallel_size} data-parallel ranks, some of which would have none"
            )
        return self

    def _check_zero(self) -> None:
        for kind, block in enumerate(self.blocks):
            if block.zero and not self.zero:
                raise ValueError(
                    f"blocks.{kind}.zero: {block.zero}, but the plan's own zero is 0.\n"
                    f"  try: zero: {block.zero} for the plan, and 0 for the blocks that are to stay whole"
                )
            if block.reshard_after_forward is not None and self.zero_of(kind) != 3:
                raise ValueError(
                    f"blocks.{kind}.reshard_after_forward: is about ZeRO-3; the block has ZeRO-{self.zero_of(kind)}"
                )
        if not self.reshard_after_forward and self.zero != 3:
            raise ValueError(f"reshard_after_forward: false is about ZeRO-3; the plan has ZeRO-{self.zero}")
        for number, stage in enumerate(self.stages):
            if stage.offload and not self.zero:
                raise ValueError(
                    f"stages.{number}.offload: what ZeRO shards is offloaded, and the plan is at zero 0.\n"
                    "  try: zero: 1 or higher"
                )
            stage.check_disk(f"stages.{number}.on_disk")
        if self.shard_axes is None:
            return
        if not self.zero:
            raise ValueError("shard_axes: there is nothing to shard at zero 0; leave shard_axes out, or set zero: 1")
        if not self.shard_axes:
            raise ValueError("shard_axes: none; leave shard_axes out for all data axes, or set zero: 0")
        for name in self.shard_axes:
            if name not in self.mesh:
                raise ValueError(f"shard_axes: {name!r} is not a mesh axis; the mesh has {list(self.mesh)}")

    def _check_rematerialisation(self) -> None:
        sets = {name for block in self.blocks for name in block.kept}
        for kind, block in enumerate(self.blocks):
            check_lists(f"blocks.{kind}", block.kept, block.host or {})
        for number, stage in enumerate(self.stages):
            for name in stage.remat:
                if name not in sets and name not in LEVELS[1:]:
                    raise ValueError(
                        f"stages.{number}.remat.{name}: expected one of {', '.join((*LEVELS[1:], *sorted(sets)))}"
                        + ("" if sets else ", or a name that blocks list under kept")
                    )

    def _check_ranks(self) -> None:
        blocks, most = sum(block.repeats for block in self.blocks), _MOST_BLOCKS
        if blocks > most:
            raise ValueError(f"blocks: {blocks:,} of them, repeats counted; expected {most:,} at most")
        if self.num_ranks > _MOST_RANKS:
            raise ValueError(f"mesh: {self.num_ranks:,} ranks; expected {_MOST_RANKS:,} at most")

    def _check_prediction(self) -> None:
        if self.prediction is None:
            return
        expected = {
            **dict.fromkeys(("stage_memory_bytes", "memory_parts_bytes", "stage_host_bytes"), self.num_pipeline_ranks),
            **dict.fromkeys(
                ("stage_forward_s", "stage_backward_s", "stage_inputs_s", "stage_weights_s"), self.num_stages
            ),
        }
        for name, count in expected.items():
            found = len(getattr(self.prediction, name) or ())
            if found not in (0, count):
                raise ValueError(f"prediction.{name}: has {found} values, expected {count}, or none")
        for one, other in (("stage_forward_s", "stage_backward_s"), ("stage_inputs_s", "stage_weights_s")):
            if len(getattr(self.prediction, one)) != len(getattr(self.prediction, other)):
                raise ValueError(f"prediction.{other}: as many values are expected as {one} has")

    def _check_schedule(self) -> None:
        if self.num_stages % self.virtual_stages:
            raise ValueError(
                f"virtual_stages: {self.num_stages} stages do not divide into {self.virtual_stages} a rank; "
                f"try {self.num_stages // self.virtual_stages * self.virtual_stages} stages"
            )
        obstacle = self.pipelining.obstacle()
        if obstacle is not None:
            raise ValueError(f"schedule: {obstacle}")

    def to_yaml(self) -> str:
        """The text that ``Plan.from_yaml`` reads back to an equal plan."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, width=110)

    @classmethod
    def from_yaml(cls, text: str, *, source: str = "plan") -> Plan:
        """A plan from its text. Raises InvalidPlan with the path of each bad field."""
        data = parse_yaml(text, source, InvalidPlan)
        if not isinstance(data, dict):
            raise InvalidPlan(f"{source}: expected a mapping with the keys of a plan, got {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise InvalidPlan(f"{source} is not a valid plan:\n{bad_fields(error, 'plan')}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        Path(path).write_text(self.to_yaml())

    def report(self, path: str | Path) -> None:
        """Write the plan as a page of HTML that needs nothing else."""
        plan_page.write(self, path)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return plan_page.render(self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and validate a plan file. Raises InvalidPlan, which names the path of a bad field."""
        return cls.from_yaml(read_text(path, "plan", InvalidPlan), source=str(path))
