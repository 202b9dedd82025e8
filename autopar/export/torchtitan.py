"""torchtitan: a module of configurations, which its trainer reads with ``--module torchtitan_plan --config plan``.

Its pattern is fixed, as Megatron's is, and its stages are lists of modules, so uneven ones can be said. The batch is

    with a pipeline      local_batch_size = microbatch x number of microbatches
    without one          local_batch_size = microbatch, and gradients accumulate up to global_batch_size

Fields are those of release 0.3, whose configurations are dataclasses.
"""

from __future__ import annotations

from typing import Any

from autopar.export import lost
from autopar.export.exported import Exported, Options, commented
from autopar.export.layers import Rematerialised, rematerialised, stage_layers
from autopar.export.rendering import render
from autopar.export.strategy import Strategy
from autopar.ir.errors import InexpressiblePlan

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_ZB_H1 = "InterleavedZeroBubble"

Fields = dict[str, Any]


def write(strategy: Strategy, options: Options) -> Exported:
    """Raises InexpressiblePlan for repeated work, and for experts on ranks that torchtitan does not take for them."""
    lost.refuse_idle(strategy, "torchtitan")
    plan = strategy.plan
    notes = [
        *lost.kept_sets(strategy),
        "A plan does not know torchtitan's models: BASE names the configuration of one that is the plan's, with its "
        "tokenizer, data, optimiser and learning rate.",
    ]
    training = _training(strategy, options, notes)
    parallelism = _data(strategy, notes) | _inside(strategy, notes) | _pipeline(strategy, notes)
    _check_experts(strategy, parallelism)
    remat = _rematerialisation(strategy, notes)
    notes += lost.op_placements(strategy, "torchtitan") + lost.rank_order(strategy)
    notes += lost.eight_bits(strategy, "torchtitan")
    notes += lost.prefetch(strategy) + lost.offload(strategy) + lost.expert_capacity(strategy)
    notes += [options.predicted] if options.predicted else []
    heading = (
        f"{plan.model.name} with torchtitan 0.3: {strategy.in_words()}.\nWritten by autopar export --to torchtitan.\n"
        f"In the folder of this file, on {plan.num_ranks} ranks:\n"
        "  BASE=llama3:llama3_70b torchrun ... -m torchtitan.train --module torchtitan_plan --config plan"
    )
    text = render(
        "torchtitan.py.jinja",
        head=commented(notes, heading),
        training=training,
        parallelism=parallelism,
        remat=remat,
        world=plan.num_ranks,
    )
    return Exported(target="torchtitan", name="torchtitan_plan.py", text=text, notes=tuple(notes))


def _training(strategy: Strategy, options: Options, notes: list[str]) -> Fields:
    plan = strategy.plan
    found: Fields = {
        "local_batch_size": strategy.microbatch_size * (strategy.num_microbatches if strategy.pipeline > 1 else 1),
        "global_batch_size": plan.batch.global_size,
        "steps": options.steps,
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": lost.any_offload(strategy),
    }
    if strategy.pipeline > 1:
        found["disable_cuda_graphs"] = True  # torchtitan refuses them in a pipeline
    if plan.model.seq is not None:
        found["seq_len"] = plan.model.seq
    else:
        notes.append("The plan does not say its sequence length: give --training.seq_len.")
    if plan.precision == "fp16":
        notes.append(
            "bfloat16 in place of float16, which torchtitan has not. It needs no loss scaler, and rounds more."
        )
    return found


def _data(strategy: Strategy, notes: list[str]) -> Fields:
    plan, zero = strategy.plan, strategy.plan.zero
    if zero in (1, 2):
        notes.append(
            f"FSDP in place of ZeRO-{zero}: parameters are gathered in every microbatch, not once a step, and kept "
            "until its backward."
        )
    left = [axis.name for axis in strategy.of_role("context") if axis not in strategy.zero_axes]
    if left:
        notes.append(f"State is sharded over context ranks; the plan replicates it over {', '.join(left)}.")
    notes += lost.per_block_zero(strategy, zero)
    return {
        "data_parallel_replicate_degree": strategy.replicated,
        "data_parallel_shard_degree": strategy.sharded,
        "fsdp_reshard_after_forward": "always" if zero == 3 and plan.reshard_after_forward else "never",
    }


def _inside(strategy: Strategy, notes: list[str]) -> Fields:
    """Tensor, context and expert parallelism."""
    found: Fields = {
        "tensor_parallel_degree": strategy.tensor,
        "enable_sequence_parallel": strategy.sequence_parallel,
        "context_parallel_degree": strategy.context,
    }
    if strategy.context > 1:
        kinds = sorted({axis.attention or "none" for axis in strategy.of_role("context")})
        zigzag = strategy.plan.sequence_layout == "zigzag"
        found["context_parallel_load_balancer"] = "headtail" if zigzag else None
        notes.append(
            f"How ranks that share a sequence exchange keys and values is torchtitan's choice; the plan's: {kinds[0]}."
        )
    if strategy.has_experts:
        found["expert_parallel_degree"] = strategy.experts
        if strategy.expert_tensor > 1:
            notes.append(
                f"Experts are not divided inside; the plan divides each over {strategy.expert_tensor} ranks. They are "
                "sharded over those as FSDP shards."
            )
    return found


def _check_experts(strategy: Strategy, parallelism: Fields) -> None:
    """torchtitan borrows the ranks of experts from those of shards, contexts and tensors."""
    ranks = parallelism["data_parallel_shard_degree"] * strategy.context * strategy.tensor
    if ranks % strategy.experts:
        raise InexpressiblePlan(
            f"torchtitan divides experts over ranks that share a shard; the plan divides them over {strategy.experts}, "
            f"and {ranks} share one.\n  the plan: {strategy.in_words()}\n"
            "  try: --to megatron, or zero: 1 or higher, over the ranks of experts too"
        )


def _pipeline(strategy: Strategy, notes: list[str]) -> Fields:
    plan = strategy.plan
    if strategy.pipeline == 1:
        return {"pipeline_parallel_degree": 1}
    schedule = _SCHEDULES.get(plan.schedule, "1F1B")
    if plan.schedule == "zb-h1" and plan.virtual_stages > 1:
        schedule = _ZB_H1
    elif plan.schedule not in _SCHEDULES:
        notes.append(
            f"The schedule is {schedule}: torchtitan has no {plan.schedule} for one stage a rank. Bubbles and memory "
            "are other ones."
        )
    count, rounds = strategy.num_microbatches, max(1, strategy.num_microbatches // strategy.pipeline)
    if plan.virtual_stages > 1 and not plan.pipelining.in_a_v and count % rounds:
        raise InexpressiblePlan(
            f"torch runs {schedule} of {count} microbatches on {strategy.pipeline} ranks in {rounds} rounds of one "
            f"size.\n  try: batch.num_microbatches of {count // rounds * rounds}, or a search with --schedule 1f1b"
        )
    if plan.pipelining.splits_backward and any(count for stage in plan.stages for count in stage.remat.values()):
        notes.append(
            f"Under {plan.schedule} torch recomputes a checkpointed block in each part of the split backward, the plan "
            "once for both. The step takes longer."
        )
    found: Fields = {
        "pipeline_parallel_degree": strategy.pipeline,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatch_size": strategy.microbatch_size,
    }
    stages = stage_layers(plan)
    if not any(stage.count for stage in stages):
        raise InexpressiblePlan(
            "torchtitan divides layers, and no block of the plan repeats or is one of a list.\n  try: --to slurm, "
            "pytorchjob or rayjob, which run the plan as it is"
        )
    parts: list[list[str]] = []
    at = 0
    for stage in stages:
        parts.append([f"layers.{number}" for number in range(at, at + stage.count)])
        at += stage.count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    found["module_fqns_per_model_part"] = parts
    if any(stage.before for stage in stages[1:]) or any(stage.after for stage in stages[:-1]):
        notes.append(
            "The embedding is on the first stage, norm and lm_head on the last; the plan has some of it elsewhere."
        )
    return found


def _rematerialisation(strategy: Strategy, notes: list[str]) -> str:
    """One setting for all layers, with as much done again as in the plan or more, so that it fits where that does."""
    stages = rematerialised(strategy.plan)
    if any(stage.full for stage in stages):
        setting, level = "FullAC.Config()", "full"
    elif any(stage.alternate or stage.selective for stage in stages):
        setting, level = "SelectiveAC.Config()", "alternate"
    else:
        return "None"
    if any(_levels(stage) not in ([], [level]) for stage in stages):
        levels = "; ".join(
            f"stage {number}: {s.full} full, {s.alternate} alternate, {s.selective} selective, {s.kept} none"
            for number, s in enumerate(stages)
        )
        notes.append(
            f"All layers are checkpointed alike, with {setting} (selective keeps every second product), so that it "
            f"fits where the plan does. The plan has, in layers: {levels}."
        )
    return setting


def _levels(stage: Rematerialised) -> list[str]:
    return [level for level in ("full", "alternate", "selective", "kept") if getattr(stage, level)]
