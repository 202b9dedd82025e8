"""From a result of the search to the plan file's terms: op keys, axis names, stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import fx

from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.goodput.choose import predicted_goodput
from autopar.cost_model.goodput.job import Job
from autopar.cost_model.memory.fit_probability import fit_probability
from autopar.ir.analysis.op_clusters import BATCH, first_instances
from autopar.ir.lowered.attention import is_attention
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.ops.op_recipes import recipe_of
from autopar.ir.placed.assign import spread
from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, PassesPlan, Plan, Prediction, Recipe, StagePlan
from autopar.ir.rule import Assignment
from autopar.ir.rules import rule_for
from autopar.ir.schedule import Pipelining
from autopar.ir.sequence import SequenceLayout
from autopar.search.predict.kept_state import model_state_bytes
from autopar.search.predict.predict import Predicted
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.allowed_choices import role_of
from autopar.search.problem.kept_sets import KeptSets, level_names
from autopar.search.problem.workload import Workload
from autopar.search.stages.stage import Stage


def plan_of(
    pricing: Pricing,
    assignment: tuple[Assignment, ...],
    stages: Sequence[Stage],
    shape: Pipelining,
    predicted: Predicted,
    *,
    samples: int | None = None,
) -> Plan:
    """The plan that states the arguments. Free axes are named after their roles. samples: see ``prediction_of``."""
    workload, cluster = pricing.workload, pricing.ops.cluster
    captured, repetition, clusters = workload.captured, workload.repetition, workload.clusters
    mesh = name_axes(workload, pricing.mesh, assignment)
    inputs = assignment[clusters.inputs.index]
    blocks: list[BlockPlan] = []
    for kind, index in zip(repetition.kinds, first_instances(repetition), strict=True):
        ops = {}
        for node in repetition.blocks[index].nodes:
            group = clusters.of.get(node)
            if group is not None and group.leader is node:
                chosen = {name: c for name, c in zip(mesh.names, assignment[group.index], strict=True) if c is not None}
                if chosen:
                    ops[repetition.key[node]] = chosen
        zero = None if pricing.zero_stages is None else pricing.zero_stages[len(blocks)]
        blocks.append(
            BlockPlan(
                name=kind.name,
                repeats=kind.repeats,
                ops=ops,
                recipes=_recipes(workload, index),
                kept=_kept(pricing, len(blocks), stages),
                host=_host(pricing, len(blocks), stages),
                zero=None if zero == pricing.zero else zero,
            )
        )
    return Plan(
        model=ModelRef(name=captured.name, fingerprint=captured.fingerprint),
        cluster=ClusterRef(
            gpu=cluster.device.name,
            num_gpus=cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            stack=cluster.device.stack.name,
            shares_nodes_of=cluster.shares_nodes_of,
        ),
        batch=Batch(
            global_size=pricing.batch_size if samples is None else samples, num_microbatches=pricing.num_microbatches
        ),
        mesh={axis.name: axis.size for axis in mesh.axes},
        inputs=[name for name, choice in zip(mesh.names, inputs, strict=True) if choice == BATCH],
        schedule=shape.schedule,
        virtual_stages=shape.virtual_stages,
        passes=None if shape.passes is None else PassesPlan.of(shape.passes, turns=shape.turns),
        sequence_layout=_sequence_layout(pricing, assignment),
        zero=pricing.zero,
        shard_axes=[mesh.names[axis] for axis in pricing.data_axes] or None if pricing.zero else None,
        prefetch=pricing.prefetch,
        reshard_after_forward=pricing.reshard,
        precision=workload.precision,
        blocks=blocks,
        stages=[_stage(stage, level_names(pricing.kept)) for stage in stages],
        prediction=prediction_of(
            pricing, predicted, data_parallel_size(mesh, inputs), pricing.mesh.names, mesh.names, samples=samples
        ),
    )


def _recipes(workload: Workload, index: int) -> dict[str, Recipe]:
    """Recipes of the products of a block, by the key of the op."""
    nodes, key = workload.repetition.blocks[index].nodes, workload.repetition.key
    return {key[node]: recipe for node in nodes if (recipe := recipe_of(node)) is not None}


def _sequence_layout(pricing: Pricing, assignment: tuple[Assignment, ...]) -> SequenceLayout:
    """Zigzag where ranks share a causal attention, and its sequence divides."""
    if not pricing.ops.balanced:
        return "contiguous"
    zigzag = pricing.workload.analysis.zigzag
    ranks = zigzag.num_ranks(spread(pricing.workload.analysis, assignment), pricing.mesh)
    return "zigzag" if ranks > 1 and zigzag.divides(ranks) else "contiguous"


def _used(pricing: Pricing, stages: Sequence[Stage]) -> list[KeptSets]:
    """The sets that the stages use."""
    names = {level_names(pricing.kept)[level] for stage in stages for level in stage.levels}
    return [sets for sets in pricing.kept if sets.name in names]


def _kept(pricing: Pricing, kind: int, stages: Sequence[Stage]) -> dict[str, list[str]]:
    """What blocks of a kind keep, by the names that the stages use."""
    every = ((sets.name, sets.listed[kind]) for sets in _used(pricing, stages))
    return {name: list(listed) for name, listed in every if listed is not None}


def _host(pricing: Pricing, kind: int, stages: Sequence[Stage]) -> dict[str, list[str]] | None:
    """What of that waits in host memory; None if nothing does."""
    return {sets.name: list(sets.host[kind]) for sets in _used(pricing, stages) if sets.host[kind]} or None


def _stage(stage: Stage, levels: Sequence[str]) -> StagePlan:
    remat = {levels[level]: count for level, count in stage.remat if level and count}
    on_disk = stage.on_disk or None
    return StagePlan(first=stage.first, last=stage.last, remat=remat, offload=stage.offload, on_disk=on_disk)


def data_parallel_size(mesh: Mesh, inputs: Assignment) -> int:
    """Ranks over which the rows of a microbatch are divided. inputs: the factors of the step inputs."""
    return prod(axis.size for axis, choice in zip(mesh.axes, inputs, strict=True) if choice == BATCH)


def prediction_of(
    pricing: Pricing,
    predicted: Predicted,
    data_parallel_size: int,
    old_names: Sequence[str] = (),
    new_names: Sequence[str] = (),
    *,
    samples: int | None = None,
) -> Prediction:
    """The prediction in the form of the plan file. Axis names in the breakdown are translated. samples: of a step, if
    those are fewer than the ones that are priced."""
    workload, cluster = pricing.workload, pricing.ops.cluster
    renamed = {f"communication_{old}": f"communication_{new}" for old, new in zip(old_names, new_names, strict=True)}
    step = predicted.step_time_s
    samples = pricing.batch_size if samples is None else samples
    flops = samples / workload.captured.batch_size * workload.model_flops / step / cluster.num_gpus
    tokens = samples / pricing.batch_size * pricing.num_tokens
    host, disk = predicted.offloaded()
    return Prediction(
        step_time_s=step,
        tokens_per_s_per_gpu=tokens / step / cluster.num_gpus,
        model_tflops_per_gpu=flops / 1e12,
        mfu=flops / cluster.device.peak_flops(workload.precision),
        peak_memory_bytes=int(predicted.peak_bytes),
        fit_probability=round(fit_probability(predicted.peak_bytes, cluster.device.usable_bytes), 3),
        stage_memory_bytes=[int(parts.total) for parts in predicted.memory],
        stage_forward_s=list(predicted.forward_s),
        stage_backward_s=list(predicted.backward_s),
        stage_inputs_s=list(predicted.inputs_s),
        stage_weights_s=list(predicted.weights_s),
        memory_parts_bytes=[parts.as_bytes() for parts in predicted.memory],
        stage_host_bytes=list(map(int, predicted.host_bytes)) if any(predicted.host_bytes) else None,
        breakdown_s={renamed.get(name, name): seconds for name, seconds in predicted.breakdown_s.items()},
        offloaded_bytes={"host": int(host), "disk": int(disk)} if host or disk else None,
        goodput=predicted_goodput(_job(pricing, predicted, data_parallel_size, tokens), cluster),
    )


def _job(pricing: Pricing, predicted: Predicted, data_parallel_size: int, tokens: float) -> Job:
    """The run of a plan, as far as failures concern it."""
    cluster = pricing.ops.cluster
    return Job(
        step_time_s=predicted.step_time_s,
        tokens_per_step=tokens,
        num_gpus=cluster.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        state_bytes=predicted.state(),
        checkpoint_bytes=model_state_bytes(pricing.workload),
        data_parallel_size=data_parallel_size,
        num_microbatches=pricing.num_microbatches,
    )


def name_axes(workload: Workload, mesh: Mesh, assignment: tuple[Assignment, ...]) -> Mesh:
    """``mesh`` with each free axis named after the role that heavy ops give it: dp, cp, ep or tp; duplicates
    numbered. An attention may divide its heads on an axis where all others divide the sequence (Ulysses)."""
    heavy = [node for node in workload.repeats if _is_heavy(workload, node)]
    taken: set[str] = set()
    axes = []
    for position, axis in enumerate(mesh.axes):
        name = axis.name
        if name.startswith("free") or not name:
            found = {n: role_of(workload, n, _own(workload, n, assignment)[position]) for n in heavy}
            roles = {role for role in found.values() if role}
            if roles - {"ep"} == {"cp", "tp"} and all(is_attention(n) for n, role in found.items() if role == "tp"):
                roles -= {"tp"}
            if roles == {"cp", "ep"}:
                roles = {"cp"}  # pieces of sequences, whose tokens travel to their experts
            name = "ep" if "ep" in roles and roles <= {"ep", "dp"} else roles.pop() if len(roles) == 1 else "tp"
            if not roles and not heavy:
                name = "dp"
            base, number = name, 2
            while name in taken or any(name == other.name for other in mesh.axes):
                name, number = f"{base}{number}", number + 1
        taken.add(name)
        axes.append(MeshAxis(name, axis.size))
    return Mesh(tuple(axes))


def _own(workload: Workload, node: fx.Node, assignment: tuple[Assignment, ...]) -> Assignment:
    group = workload.cluster_of(node)
    return group.assignment(node, assignment[group.index])


def _is_heavy(workload: Workload, node: fx.Node) -> bool:
    return node in workload.repetition.block_of and is_contraction(node, rule_for(node))
