"""Hugging Face Accelerate: the file that ``accelerate launch --config_file`` reads.

    plan                               distributed_type
    ZeRO-0                             MULTI_GPU (DDP), MULTI_CPU
    ZeRO-1, ZeRO-2 over all ranks      DEEPSPEED, with its settings inline
    ZeRO-3, or hybrid, or with tensor
    or context parallelism             FSDP (version 2) with parallelism_config

Accelerate's tensor parallelism is that of the model's own plan in transformers.
"""

from __future__ import annotations

from typing import Any

import yaml

from autopar.export import deepspeed, lost
from autopar.export.exported import Exported, Options, commented
from autopar.export.nodes import nodes_of
from autopar.export.strategy import Strategy


def write(strategy: Strategy, options: Options) -> Exported:
    """Raises InexpressiblePlan for pipelines and experts."""
    lost.refuse(
        strategy,
        "Accelerate",
        ("idle",),
        experts=True,
        pipeline=True,
        why="has data parallelism, tensor parallelism of models that bring a plan, and shared sequences",
    )
    plan, nodes = strategy.plan, nodes_of(strategy.plan)
    notes = lost.kept_sets(strategy)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO" if plan.num_ranks == 1 else "MULTI_GPU" if nodes.gpus else "MULTI_CPU",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "num_machines": nodes.count,
        "num_processes": plan.num_ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not nodes.gpus,
    }
    if nodes.count > 1:
        config |= {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
        notes.append(
            f"On {nodes.count} machines: put the first one's address for main_process_ip, and launch on each with its "
            "--machine_rank."
        )
    sharded_by_axes = strategy.tensor > 1 or strategy.context > 1
    if plan.zero in (1, 2) and strategy.replicated == 1 and not sharded_by_axes:
        config |= _deepspeed(strategy, notes)
    elif plan.zero or sharded_by_axes:
        config |= _fsdp(strategy, notes)
    notes.insert(
        0,
        f"In the program: Accelerator(gradient_accumulation_steps={strategy.num_microbatches}), and a loader with "
        f"batches of {strategy.microbatch_size} on each of {strategy.data} data ranks: {plan.batch.global_size} "
        "samples a step.",
    )
    heading = f"{plan.model.name} with Accelerate: {strategy.in_words()}.\nWritten by autopar export --to accelerate."
    text = commented(notes, heading) + yaml.safe_dump(config, sort_keys=True)
    return Exported(target="accelerate", name="accelerate.yaml", text=text, notes=tuple(notes))


def _deepspeed(strategy: Strategy, notes: list[str]) -> dict[str, Any]:
    """ZeRO-1 and 2, which FSDP has not: it gathers parameters block by block."""
    _, lost_there = deepspeed.settings(strategy)
    notes += lost_there
    offload = "cpu" if lost.any_offload(strategy) else "none"
    return {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": strategy.plan.zero,
            "gradient_accumulation_steps": strategy.num_microbatches,
            "offload_optimizer_device": offload,
            "offload_param_device": "none",
            "zero3_init_flag": False,
        },
    }


def _fsdp(strategy: Strategy, notes: list[str]) -> dict[str, Any]:
    plan = strategy.plan
    if any(axis.attention == "heads" for axis in strategy.of_role("context")):
        notes.append("Keys and values are gathered; the plan divides heads (Ulysses), which sends less.")
    zero = plan.zero
    if zero in (0, 1, 2):
        notes.append(
            f"FSDP in place of ZeRO-{zero}, as Accelerate combines nothing else with other axes or with copies: "
            "parameters are gathered in every microbatch and kept until its backward."
        )
    notes += lost.per_block_zero(strategy, zero) if zero else []
    notes += lost.prefetch(strategy) + lost.offload(strategy) + lost.op_placements(strategy, "the model's own plan")
    notes += lost.eight_bits(strategy, "Accelerate")
    notes += lost.sequence_layout(strategy, balanced=True)
    notes.append(
        "Blocks are found by the model's _no_split_modules, as models of transformers have them. For another model "
        f"name its classes in fsdp_transformer_layer_cls_to_wrap: of {', '.join(_blocks(strategy)) or 'its layers'}."
    )
    remat = sorted({level for stage in plan.stages for level, count in stage.remat.items() if count})
    if remat:
        notes.append(f"Activation checkpointing is in full, of every block; the plan has {', '.join(remat)}.")
    # Copies alone cannot be combined with other axes.
    replicated = strategy.replicated if strategy.sharded > 1 else 1
    found: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": zero == 3 and plan.reshard_after_forward,
            "fsdp_offload_params": lost.any_offload(strategy),
            "fsdp_activation_checkpointing": bool(remat),
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    if strategy.replicated > 1 or strategy.tensor > 1 or strategy.context > 1:
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicated,
            "parallelism_config_dp_shard_size": strategy.data // replicated,
            "parallelism_config_tp_size": strategy.tensor,
            "parallelism_config_cp_size": strategy.context,
        }
    return found


def _blocks(strategy: Strategy) -> list[str]:
    return [block.name for block in strategy.plan.blocks if block.repeats > 1]
