"""Megatron-LM: the flags of ``pretrain_gpt.py`` in a shell script that starts it under torchrun.

Megatron's pattern is fixed: products split by output, then by input; heads; rows of the vocabulary; between them rows
of the sequence if asked for. So of a plan's placements it takes the degrees. Its ranks are

    world = pipeline x data x context x tensor,      batch = data x microbatch x number of microbatches

and experts are divided over ranks of data, context and tensor groups together. Flags are those of Megatron core 0.14.
"""

from __future__ import annotations

from autopar.export import lost
from autopar.export.exported import Exported, Options, commented
from autopar.export.layers import is_even, num_layers, rematerialised, stage_layers
from autopar.export.nodes import nodes_of
from autopar.export.rendering import render
from autopar.export.strategy import Strategy
from autopar.ir.errors import InexpressiblePlan

Flag = tuple[str, ...]
"""A flag and its values."""

_COMMUNICATION = {"ring": "p2p", "gathered": "all_gather", "heads": "a2a", "": "p2p"}


def write(strategy: Strategy, options: Options) -> Exported:
    """Raises InexpressiblePlan for repeated work, and for stages or microbatches that Megatron cannot divide so."""
    lost.refuse_idle(strategy, "Megatron-LM")
    plan = strategy.plan
    notes = lost.kept_sets(strategy)
    flags = [
        *_degrees(strategy, notes),
        *_pipeline(strategy, notes),
        ("--micro-batch-size", str(strategy.microbatch_size)),
        ("--global-batch-size", str(plan.batch.global_size)),
        *_zero(strategy, notes),
        *_rematerialisation(strategy, notes),
        *([(f"--{plan.precision}",)] if plan.precision != "fp32" else []),
        *_experts(strategy, notes),
    ]
    notes += lost.op_placements(strategy, "Megatron") + lost.eight_bits(strategy, "the script")
    notes.append(
        "The plan does not know sizes of the model: set HIDDEN_SIZE, NUM_ATTENTION_HEADS and what the script asks "
        "for; what else makes the model what it is (--swiglu, --group-query-attention ...) are arguments of the script."
    )
    notes += [options.predicted] if options.predicted else []
    heading = f"{plan.model.name} with Megatron-LM: {strategy.in_words()}.\nWritten by autopar export --to megatron."
    crowded = strategy.tensor > 1 or strategy.context > 1
    text = render(
        "megatron.sh.jinja",
        head=commented(notes, heading),
        nodes=nodes_of(plan),
        flags=flags,
        num_layers=num_layers(plan),
        seq=plan.model.seq,
        steps=options.steps,
        experts=strategy.has_experts,
        one_connection=crowded and ("--use-megatron-fsdp",) not in flags,
        world=strategy.world,
    )
    return Exported(target="megatron", name="train_megatron.sh", text=text, notes=tuple(notes))


def _degrees(strategy: Strategy, notes: list[str]) -> list[Flag]:
    flags: list[Flag] = [
        ("--tensor-model-parallel-size", str(strategy.tensor)),
        ("--pipeline-model-parallel-size", str(strategy.pipeline)),
        ("--context-parallel-size", str(strategy.context)),
    ]
    if strategy.context > 1:
        kinds = sorted({axis.attention for axis in strategy.of_role("context")})
        flags.append(("--cp-comm-type", _COMMUNICATION[kinds[0]]))
        if len(kinds) > 1:
            notes.append("One kind of context parallelism for all ranks; the plan has several, an axis each.")
        notes += lost.sequence_layout(strategy, balanced=True)
    sequence = strategy.sequence_parallel
    if strategy.tensor > 1 and strategy.has_experts and not sequence:
        sequence = True
        notes.append("Experts beside tensor parallelism need --sequence-parallel, which the plan has not.")
    if sequence:
        flags.append(("--sequence-parallel",))
    notes += lost.rank_order(strategy)
    return flags


def _pipeline(strategy: Strategy, notes: list[str]) -> list[Flag]:
    plan = strategy.plan
    if strategy.pipeline == 1:
        return []
    stages = stage_layers(plan)
    hollow = [number for number, stage in enumerate(stages) if not stage.count and 0 < number < len(stages) - 1]
    if hollow:
        raise InexpressiblePlan(
            f"Megatron-LM cannot say stages without a layer, as stage {hollow[0]} of the plan is.\n"
            "  try: other stages, or a search with a smaller --pp"
        )
    flags: list[Flag] = []
    if not is_even(stages):
        flags.append(("--pipeline-model-parallel-layout", _layout([stage.count for stage in stages])))
    elif plan.virtual_stages > 1:
        flags.append(("--num-layers-per-virtual-pipeline-stage", str(stages[0].count)))
    if plan.virtual_stages > 1:
        flags += _rounds(strategy)
    if plan.schedule not in ("1f1b", "interleaved"):
        taken = "interleaved 1F1B" if plan.virtual_stages > 1 else "1F1B"
        notes.append(f"The schedule is {taken}: Megatron has no {plan.schedule}. Bubbles and memory are other ones.")
    if plan.virtual_stages > 1 and plan.pipelining.rank_of(strategy.pipeline) != 0:
        notes.append(
            "Stages go round the ranks in a loop; in the plan they turn at the last rank, so others share a rank."
        )
    if any(stage.before for stage in stages[1:]) or any(stage.after for stage in stages[:-1]):
        notes.append("Megatron embeds on the first stage, and normalises, projects and takes the loss on the last.")
    return flags


def _layout(counts: list[int]) -> str:
    """``Et*3|t*4|t*3L``: embedding, layers and loss of every stage."""
    parts = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(parts)


def _rounds(strategy: Strategy) -> list[Flag]:
    """Microbatches that go through one stage of a rank before its next one has its turn."""
    count, ranks = strategy.num_microbatches, strategy.pipeline
    size = count // max(1, count // ranks)
    if count < ranks or count % size:
        raise InexpressiblePlan(
            f"Megatron-LM runs interleaved stages on {ranks} ranks in rounds of {ranks} microbatches or more; the "
            f"plan's {count} do not divide so.\n"
            f"  try: batch.num_microbatches of {max(1, count // ranks) * ranks}, or a search with --schedule 1f1b"
        )
    return [("--microbatch-group-size-per-virtual-pipeline-stage", str(size))] if size != ranks else []


def _zero(strategy: Strategy, notes: list[str]) -> list[Flag]:
    """Stage 1 is the distributed optimizer; 2 and 3 are Megatron-FSDP, which has no pipeline."""
    zero = strategy.plan.zero
    if not zero:
        return [("--overlap-grad-reduce",)] if strategy.data > 1 else []
    flags: list[Flag] = [("--use-distributed-optimizer",), ("--overlap-grad-reduce",), ("--overlap-param-gather",)]
    if zero > 1 and strategy.pipeline > 1:
        what = "optimiser state, gradients and parameters" if zero == 3 else "optimiser state and gradients"
        notes.append(
            f"ZeRO-1 instead of ZeRO-{zero}: Megatron-FSDP has no pipeline. The plan shards {what}; here only the "
            "optimiser state is, so a rank takes more memory than was predicted, and may run out of it."
        )
        zero = 1
    elif zero > 1:
        flags += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", "optim_grads" if zero == 2 else "optim_grads_params"),
            ("--no-gradient-accumulation-fusion",),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    if strategy.replicated > 1:
        flags.append(("--num-distributed-optimizer-instances", str(strategy.replicated)))
    left = [axis.name for axis in strategy.of_role("context") if axis not in strategy.zero_axes]
    if left:
        notes.append(f"State is sharded over context ranks too; the plan replicates it over {', '.join(left)}.")
    if lost.any_offload(strategy):
        flags += [
            ("--use-precision-aware-optimizer",),
            ("--optimizer-cpu-offload",),
            ("--optimizer-offload-fraction", "1.0"),
        ]
        notes.append("What is offloaded is the optimiser's state and step; parameters and gradients stay on the GPU.")
        notes += lost.offload(strategy)
    notes += lost.per_block_zero(strategy, zero) + lost.prefetch(strategy)
    return flags


def _rematerialisation(strategy: Strategy, notes: list[str]) -> list[Flag]:
    stages = rematerialised(strategy.plan)
    redone = max(stage.full + stage.alternate + stage.selective for stage in stages)
    if not redone:
        return []
    if any(stage.full for stage in stages):
        if len(set(stages)) > 1 or stages[0].alternate or stages[0].selective:
            levels = "; ".join(
                f"stage {number}: {stage.full} full, {stage.alternate} alternate, {stage.selective} selective"
                for number, stage in enumerate(stages)
            )
            notes.append(
                f"Every stage recomputes {redone} layers in full, so that it fits where the plan does: Megatron has "
                f"one level and one number for all stages. The plan has, in layers: {levels}."
            )
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "block"),
            ("--recompute-num-layers", str(redone)),
        ]
    modules = ("core_attn", "layernorm", *(("moe_act",) if strategy.has_experts else ()))
    notes.append(
        f"Selective recomputation is of {', '.join(modules)} in every layer, which is the nearest to keeping products "
        "alone." + (" The plan keeps everything in some layers." if any(stage.kept for stage in stages) else "")
    )
    if any(stage.alternate for stage in stages):
        notes.append(
            "The plan recomputes every second product of some layers, which Megatron cannot; memory is higher."
        )
    return [("--recompute-granularity", "selective"), ("--recompute-modules", *modules)]


def _experts(strategy: Strategy, notes: list[str]) -> list[Flag]:
    if not strategy.has_experts:
        return []
    notes += lost.expert_ranks(strategy)
    flags: list[Flag] = [
        ("--expert-model-parallel-size", str(strategy.experts)),
        ("--expert-tensor-parallel-size", str(strategy.expert_tensor)),
        ("--moe-token-dispatcher-type", "alltoall"),
    ]
    if strategy.plan.precision == "bf16":
        flags.append(("--moe-grouped-gemm",))  # there is none in other precisions
    if strategy.plan.expert_capacity is not None:
        flags.append(("--moe-expert-capacity-factor", f"{strategy.plan.expert_capacity:g}"))
    return flags
