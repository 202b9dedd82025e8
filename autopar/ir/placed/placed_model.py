"""A captured model under one plan: what the plan means, worked out once for passes, prediction and reports.

factor of every op on every axis   ->  layout of every tensor  ->  moves between layouts
needs of every use of a parameter  ->  how it is stored, and where its gradient is summed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.matrix_factors import find_stacks_of_experts
from autopar.ir.analysis.op_clusters import BATCH
from autopar.ir.analysis.zigzag import ZigzagSequence
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel, call_nodes, is_getitem, source, tensor_operands
from autopar.ir.lowered.table import lowering_of
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.placed.assign import assignment_of, check_plan_fits, complete, inputs_of, spread
from autopar.ir.placed.carry import carry
from autopar.ir.placed.layouts import Layouts, Need, made_on_axis
from autopar.ir.placed.storage import Storage, store
from autopar.ir.placement import Layout, Placement, Replicate, local_shape
from autopar.ir.plan import Plan
from autopar.ir.rematerialisation import LEVELS, Remat
from autopar.ir.rule import Choice

TIME = "microbatch"


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedModel:
    """An analysis under a plan.

    layouts: of its tensors on the stage mesh. storage: of every parameter, by placeholder name. shard_axes: mesh axes
    that ZeRO shards over. zigzag: how the sequence is stored in zigzag order by ``zigzag_ranks`` ranks; None in natural
    order. A microbatch is the batch divided in time, over an axis that no collective crosses.
    """

    analysis: Analysis
    plan: Plan
    layouts: Layouts
    storage: Mapping[str, Storage]
    shard_axes: tuple[int, ...]
    zigzag: ZigzagSequence | None = None
    zigzag_ranks: int = 1

    @property
    def captured(self) -> CapturedModel:
        """The captured model."""
        return self.analysis.captured

    @property
    def mesh(self) -> Mesh:
        """The mesh of one stage."""
        return self.plan.stage_mesh

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return self.plan.batch.num_microbatches

    @cached_property
    def time_and_mesh(self) -> Mesh:
        """The mesh of one stage with the microbatches as an axis in front, which no collective crosses."""
        return Mesh((MeshAxis(TIME, self.num_microbatches), *self.mesh.axes))

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node is the placeholder of a parameter."""
        return node.op == "placeholder" and node.name in self.captured.parameters

    def layout(self, node: fx.Node) -> Layout:
        """Layout on the stage mesh that ``node`` is made in; of a parameter, that it is stored in."""
        if self.is_parameter(node):
            return self.storage[node.name].layout
        return self.layouts.made(*source(node))

    def time_choice(self, node: fx.Node) -> Choice:
        """The factor of an op that microbatches divide."""
        return self.analysis.roles.batch.get(node) if self.num_microbatches > 1 else None

    def over_time(self, node: fx.Node) -> Placement:
        """Whether a microbatch has a part of ``node``, a summand of it, or all of it."""
        producer, result = source(node)
        if self.num_microbatches == 1 or self.is_parameter(node):
            return Replicate()
        choice = self.time_choice(producer) if producer.op == "call_function" else BATCH
        return made_on_axis(self.analysis, producer, result, choice)

    def needed_over_time(self, user: fx.Node, position: int) -> Placement:
        """Placement over microbatches in which ``user`` needs its operand ``position``."""
        return self.analysis.rule(user).operand(position, self.time_choice(user))[0]

    def remat_of(self, block: int) -> Remat:
        """How block number ``block`` is rematerialised."""
        level = self.plan.remat_of(block)
        own: Remat = "none" if self.kept_of(block) is None else "listed"
        return next((one for one in LEVELS if one == level), own)

    def kept_of(self, block: int) -> frozenset[str] | None:
        """What the plan lists for block number ``block`` to keep, where it has a list for it."""
        kind = self.analysis.repetition.blocks[block].kind
        listed = self.plan.blocks[kind].kept.get(self.plan.remat_of(block))
        return None if listed is None else frozenset(listed)

    def host_of(self, block: int) -> frozenset[str]:
        """What of that waits in host memory, as the plan lists it."""
        host = self.plan.blocks[self.analysis.repetition.blocks[block].kind].host or {}
        return frozenset(host.get(self.plan.remat_of(block), ()))

    def lowering(self, op: fx.Node) -> str | None:
        """Name of the lowering of ``op``, None if it is the op itself on shards."""
        if self.zigzag is not None and op in self.zigzag.attentions:
            return "ring"
        return lowering_of(self.analysis.rule(op), self.layouts.assignments[op])

    def local_shape(self, node: fx.Node, layout: Layout, over_time: Placement) -> tuple[int, ...]:
        """Shape of the part of ``node`` that one rank has in one microbatch."""
        return local_shape(node.meta["val"].shape, (over_time, *layout), self.time_and_mesh)

    def input_layouts(self) -> dict[str, Layout]:
        """Layout in which each step input arrives, by placeholder name."""
        return {node.name: self.layouts.made(node) for node in self.analysis.clusters.input_dims}


def place(analysis: Analysis, plan: Plan) -> PlacedModel:
    """The model that ``plan`` was made for, under it. Raises PlanMismatch or InvalidPlan, saying what does not fit."""
    _check_batch(analysis, plan)
    check_plan_fits(analysis, plan)
    assignments = complete(analysis, spread(analysis, assignment_of(analysis, plan)))
    layouts = Layouts(analysis=analysis, assignments=assignments, inputs=inputs_of(plan))
    captured = analysis.captured
    needs: dict[str, list[Need]] = {name: [] for name in captured.parameters}
    for node in call_nodes(captured.graph):
        if is_getitem(node):
            continue
        for position, operand in enumerate(tensor_operands(node)):
            if operand.op == "placeholder" and operand.name in needs:
                needs[operand.name].append(layouts.need(node, position))
    storage, shard_axes = store(needs, plan, layouts.inputs, captured.parameters, find_stacks_of_experts(analysis))
    return _in_zigzag_order(
        PlacedModel(analysis=analysis, plan=plan, layouts=layouts, storage=storage, shard_axes=shard_axes)
    )


def place_captured(captured: CapturedModel, plan: Plan) -> PlacedModel:
    """``place`` for a captured model that is not analysed yet."""
    return place(Analysis.for_plan(captured, plan), plan)


def place_like(analysis: Analysis, like: PlacedModel) -> PlacedModel:
    """The model in another mode or at other sizes, its parameters stored and its ops placed as in ``like``.

    An op whose sizes do not divide as there takes its operands as they come. The plan is that of ``like`` for the batch
    of ``analysis``. Raises PlanMismatch where it uses parameters that ``like`` does not have in the same pieces.
    """
    captured = analysis.captured
    batch = like.plan.batch.model_copy(update={"global_size": captured.batch_size})
    plan = like.plan.model_copy(update={"batch": batch})
    _check_batch(analysis, plan)
    stored = {like.captured.parameters[name].name: storage for name, storage in like.storage.items()}
    for parameter in captured.parameters.values():
        if parameter.name not in stored:
            raise PlanMismatch(
                f"{captured.name} stores {parameter.whole_names[0]} in one piece in one mode, and in several in the "
                "other: its train and eval modes use it differently.\n"
                "  expected: ops that read it alike in both modes\n  try: evaluate the plain model of full_state_dict()"
            )
    repetition, assignments = carry(analysis, plan, like.analysis, like.layouts.assignments)
    analysis = replace(analysis, repetition=repetition)
    return _in_zigzag_order(
        PlacedModel(
            analysis=analysis,
            plan=plan,
            layouts=Layouts(analysis=analysis, assignments=assignments, inputs=like.layouts.inputs),
            storage={name: stored[parameter.name] for name, parameter in captured.parameters.items()},
            shard_axes=like.shard_axes,
        )
    )


def _check_batch(analysis: Analysis, plan: Plan) -> None:
    """Raise PlanMismatch if the batch is not that of ``plan`` or cannot be divided into its microbatches."""
    captured = analysis.captured
    if captured.batch_size != plan.planned_rows:
        raise PlanMismatch(
            f"batch: the plan is for {plan.planned_rows} samples a step, the example inputs have "
            f"{captured.batch_size}.\n  try: example inputs with {plan.planned_rows} rows (the global batch)"
        )
    if plan.batch.num_microbatches > 1 and analysis.obstacle is not None:
        raise PlanMismatch(f"batch: cannot be cut into {plan.batch.num_microbatches} microbatches: {analysis.obstacle}")


def _in_zigzag_order(placed: PlacedModel) -> PlacedModel:
    """With its sequence in zigzag order if the plan asks for that. Raises PlanMismatch if it cannot be."""
    if placed.plan.sequence_layout == "contiguous":
        return placed
    zigzag = placed.analysis.zigzag
    reason, ranks = zigzag.obstacle, 1
    if reason is None:
        ranks = zigzag.num_ranks(placed.layouts.assignments, placed.mesh)
        if ranks > 1 and not zigzag.divides(ranks):
            reason = f"{zigzag.length} positions do not divide by {zigzag.divisor(ranks)}, for {ranks} ranks"
    if reason is not None:
        raise PlanMismatch(
            f"sequence_layout: {placed.captured.name} cannot be run in zigzag order: {reason}.\n"
            "  try: sequence_layout: contiguous"
        )
    return replace(placed, zigzag=zigzag, zigzag_ranks=ranks) if ranks > 1 else placed
