"""DeepSpeed: ``ds_config.json``: ZeRO and its offload, precision, and the batch, which DeepSpeed checks:

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks

Tensor parallelism is its AutoTP, which divides the products of models that it knows, with ZeRO up to stage 2; sequences
shared by heads are its Ulysses. Pipelines and experts are code in DeepSpeed, not configuration, and are refused.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.export import lost
from autopar.export.exported import Exported, Options
from autopar.export.strategy import Strategy
from autopar.ir.errors import InexpressiblePlan

# More than any model has: parameters that are to stay until the backward, as DeepSpeed counts them.
_ALL_PARAMETERS = 10**15


def write(strategy: Strategy, options: Options) -> Exported:
    """Raises InexpressiblePlan for pipelines, experts, rings, and tensor parallelism with ZeRO-3."""
    lost.refuse(strategy, "DeepSpeed", ("idle",), experts=True, pipeline=True, why="its configuration has ZeRO, AutoTP "
                "and Ulysses; pipelines and experts are modules that a program builds")  # fmt: skip
    _refuse_unknown(strategy)
    config, notes = settings(strategy)
    return Exported(
        target="deepspeed", name="ds_config.json", text=json.dumps(config, indent=2) + "\n", notes=tuple(notes)
    )


def settings(strategy: Strategy) -> tuple[dict[str, Any], list[str]]:
    """The configuration, and what is lost."""
    plan = strategy.plan
    notes = lost.kept_sets(strategy)
    config: dict[str, Any] = {
        "train_batch_size": plan.batch.global_size,
        "train_micro_batch_size_per_gpu": strategy.microbatch_size,
        "gradient_accumulation_steps": strategy.num_microbatches,
        "zero_optimization": _zero(strategy, notes),
        "zero_allow_untested_optimizer": True,
    }
    if plan.precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif plan.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0}
    if plan.precision != "fp32":
        # As in the plan: gradients are summed in float32, over microbatches and over ranks.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    notes += lost.eight_bits(strategy, "DeepSpeed")
    if strategy.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": strategy.tensor}
        notes += lost.op_placements(strategy, "AutoTP")
        notes.append("AutoTP divides models of Hugging Face by its own rules; vocabularies and norms stay whole.")
        if strategy.sequence_parallel:
            notes.append("No sequence parallelism beside tensor parallelism: activations between products are whole.")
    if strategy.context > 1:
        config["sequence_parallel_size"] = strategy.context
        notes.append(
            "Ulysses: the model's attention has to be DeepSpeed's (UlyssesSPAttentionHF), and the loader its adapter."
        )
        notes += lost.sequence_layout(strategy, balanced=False)
    if any(count for stage in plan.stages for count in stage.remat.values()):
        notes.append(
            "Rematerialisation is the model's there: model.gradient_checkpointing_enable(), or "
            "deepspeed.checkpointing.checkpoint around "
            + ", ".join(sorted({level for stage in plan.stages for level, count in stage.remat.items() if count}))
            + " blocks of the plan."
        )
    notes.append(
        "Optimiser, learning rate and clipping are not in a plan: give them to deepspeed.initialize, or add them."
    )
    return config, notes


def _zero(strategy: Strategy, notes: list[str]) -> dict[str, Any]:
    plan, zero = strategy.plan, strategy.plan.zero
    found: dict[str, Any] = {"stage": zero}
    if not zero:
        return found
    found |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if strategy.replicated > 1:
        if zero == 3:
            found["zero_hpz_partition_size"] = strategy.sharded
            notes.append(
                f"Of hybrid sharding, parameters are gathered among {strategy.sharded} ranks next to each other "
                f"(ZeRO++ hpZ); gradients and optimiser state are sharded over all {strategy.data} data ranks."
            )
        else:
            notes.append(
                f"ZeRO-{zero} shards over all {strategy.data} data ranks; the plan over {strategy.sharded} of them."
            )
    if zero == 3:
        if not plan.reshard_after_forward:
            found |= {"stage3_max_live_parameters": _ALL_PARAMETERS, "stage3_max_reuse_distance": _ALL_PARAMETERS}
        if plan.prefetch > 1:
            notes.append(
                f"DeepSpeed gathers ahead by size, not by blocks: for the plan's {plan.prefetch}, set "
                "stage3_prefetch_bucket_size to as many parameters as so many blocks have."
            )
        found["stage3_gather_16bit_weights_on_model_save"] = True
    if lost.any_offload(strategy):
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if zero == 3:
            found["offload_param"] = {"device": "cpu", "pin_memory": True}
        notes += lost.offload(strategy)
    notes += lost.per_block_zero(strategy, zero)
    return found


def _refuse_unknown(strategy: Strategy) -> None:
    if strategy.tensor > 1 and strategy.plan.zero == 3:
        raise InexpressiblePlan(
            f"DeepSpeed's AutoTP works with ZeRO up to stage 2; the plan has tensor parallelism over {strategy.tensor} "
            "ranks and ZeRO-3.\n  try: zero: 2 in the plan, or --to megatron, torchtitan or accelerate"
        )
    if strategy.tensor > 1 and strategy.context > 1:
        raise InexpressiblePlan(
            "DeepSpeed has no AutoTP and Ulysses at once.\n"
            f"  the plan: {strategy.in_words()}\n  try: --to megatron or torchtitan"
        )
    rings = [axis.name for axis in strategy.of_role("context") if axis.attention != "heads"]
    if rings:
        raise InexpressiblePlan(
            f"DeepSpeed shares sequences by heads (Ulysses); the plan shares keys over {', '.join(rings)}.\n"
            "  try: --to megatron or torchtitan, or attention by heads: h in place of s on that axis"
        )
