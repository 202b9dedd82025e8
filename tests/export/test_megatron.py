"""The script is run by bash with a torchrun that prints its arguments, which are parsed as Megatron parses them.

Megatron cannot be installed here; ``parser`` has the flags that the script uses with the types and choices that
megatron/training/arguments.py gives them, and ``check`` what ``validate_args`` demands of them.
"""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.export import export
from autopar.ir.errors import InexpressiblePlan
from autopar.ir.plan import Plan, StagePlan
from tests.export.plans import decoder_plan, with_experts

MODEL = {
    "HIDDEN_SIZE": "4096", "NUM_ATTENTION_HEADS": "32", "VOCAB_SIZE": "32000", "NUM_EXPERTS": "64",
    "MOE_ROUTER_TOPK": "2", "MASTER_ADDR": "node-0",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings", "vocab-size",
        "train-iters", "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
        "expert-model-parallel-size", "expert-tensor-parallel-size", "micro-batch-size", "global-batch-size",
        "num-layers-per-virtual-pipeline-stage", "microbatch-group-size-per-virtual-pipeline-stage",
        "num-distributed-optimizer-instances", "recompute-num-layers", "num-experts", "moe-router-topk",
    ):  # fmt: skip
        found.add_argument(f"--{name}", type=int)
    for name in ("lr", "min-lr", "clip-grad", "moe-expert-capacity-factor", "optimizer-offload-fraction"):
        found.add_argument(f"--{name}", type=float)
    for name in (
        "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather",
        "use-megatron-fsdp", "no-gradient-accumulation-fusion", "use-precision-aware-optimizer", "moe-grouped-gemm",
        "optimizer-cpu-offload", "bf16", "fp16", "mock-data", "swiglu",
    ):  # fmt: skip
        found.add_argument(f"--{name}", action="store_true")
    found.add_argument("--recompute-granularity", choices=("full", "selective"))
    found.add_argument("--recompute-method", choices=("uniform", "block"))
    found.add_argument("--recompute-modules", nargs="*", choices=("core_attn", "moe_act", "layernorm", "mlp", "moe"))
    found.add_argument(
        "--data-parallel-sharding-strategy", choices=("no_shard", "optim", "optim_grads", "optim_grads_params")
    )
    found.add_argument("--cp-comm-type", nargs="+", default=["p2p"], choices=("p2p", "a2a", "all_gather", "a2a+p2p"))
    found.add_argument("--moe-token-dispatcher-type", choices=("allgather", "alltoall", "flex"))
    found.add_argument("--ckpt-format", choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"))
    for name in ("pipeline-model-parallel-layout", "tokenizer-type", "lr-decay-style"):
        found.add_argument(f"--{name}")
    return found


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a torchrun that prints its arguments."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "torchrun"
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def arguments(plan: Plan, stub: Path) -> tuple[argparse.Namespace, argparse.Namespace, dict[str, str]]:
    """What the script of a plan gives to torchrun, and what to Megatron; and the environment it adds."""
    text = export(plan, "megatron").text
    environment = {**MODEL, "PATH": f"{stub}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text, "train", "--swiglu"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + text
    words = done.stdout.split("\0")[:-1]
    at = words.index("pretrain_gpt.py")
    launcher = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nnodes", "nproc-per-node", "node-rank", "master-port"):
        launcher.add_argument(f"--{name}", type=int, required=True)
    launcher.add_argument("--master-addr", required=True)
    added = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if "export CUDA_DEVICE_MAX_CONNECTIONS=1" in text else {}
    return launcher.parse_args(words[:at]), parser().parse_args(words[at + 1 :]), added


def stages_of(layout: str) -> list[str]:
    """Megatron's layout with repeats written out, stage by stage."""
    found = ""
    at = 0
    while at < len(layout):
        token, at = layout[at], at + 1
        if at < len(layout) and layout[at] == "*":
            digits = ""
            at += 1
            while at < len(layout) and layout[at].isdigit():
                digits, at = digits + layout[at], at + 1
            token *= int(digits)
        found += token
    return found.split("|")


def check(plan: Plan, stub: Path) -> argparse.Namespace:
    """The degrees multiply to the ranks, the batch is the plan's, and Megatron's own conditions hold."""
    launcher, args, environment = arguments(plan, stub)
    tensor, pipeline, context = (
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size,
    )  # fmt: skip
    world = launcher.nnodes * launcher.nproc_per_node
    assert world == plan.num_ranks
    assert world % (tensor * pipeline * context) == 0
    data = world // (tensor * pipeline * context)
    per_step = args.micro_batch_size * data
    assert args.global_batch_size == plan.batch.global_size
    assert args.global_batch_size % per_step == 0
    assert args.global_batch_size // per_step == plan.batch.num_microbatches
    if args.num_experts is not None:
        assert (tensor * context * data) % (args.expert_model_parallel_size * args.expert_tensor_parallel_size) == 0
        assert args.num_experts % args.expert_model_parallel_size == 0
        assert tensor == 1 or args.sequence_parallel
    if args.pipeline_model_parallel_layout is not None:
        assert args.num_layers_per_virtual_pipeline_stage is None
        stages = stages_of(args.pipeline_model_parallel_layout)
        assert len(stages) == plan.num_stages
        assert sum(stage.count("t") for stage in stages) == args.num_layers
        assert stages[0][0] == "E" and stages[-1][-1] == "L"
    else:
        assert args.num_layers % pipeline == 0
        if args.num_layers_per_virtual_pipeline_stage is not None:
            assert (args.num_layers // pipeline) % args.num_layers_per_virtual_pipeline_stage == 0
            assert args.num_layers // pipeline // args.num_layers_per_virtual_pipeline_stage == plan.virtual_stages
    if plan.virtual_stages > 1:
        size = args.microbatch_group_size_per_virtual_pipeline_stage or pipeline
        assert size >= pipeline and plan.batch.num_microbatches % size == 0
    assert not args.overlap_param_gather or (args.use_distributed_optimizer and args.overlap_grad_reduce)
    assert not args.optimizer_cpu_offload or args.use_precision_aware_optimizer
    assert not args.use_megatron_fsdp or (args.ckpt_format == "fsdp_dtensor" and pipeline == 1 and not environment)
    assert (tensor == 1 and context == 1) or args.use_megatron_fsdp or environment
    if args.recompute_granularity == "selective":
        assert args.recompute_method is None
    if args.num_distributed_optimizer_instances is not None:
        assert (data * context) % args.num_distributed_optimizer_instances == 0
    return args


DEGREES = st.sampled_from((1, 2, 4, 8))


@given(
    pp=DEGREES, dp=DEGREES, cp=DEGREES, ep=DEGREES, tp=DEGREES,
    virtual=st.sampled_from((1, 2)), rounds=st.integers(1, 4), microbatch=st.integers(1, 3), zero=st.integers(0, 3),
    kind=st.sampled_from(("ring", "gathered", "heads")), experts=st.booleans(), hybrid=st.booleans(),
    precision=st.sampled_from(("fp32", "bf16", "fp16")), cuts=st.data(),
)  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_flags_multiply_to_the_ranks(
    stub: Path, pp: int, dp: int, cp: int, ep: int, tp: int, virtual: int, rounds: int, microbatch: int, zero: int,
    kind: str, experts: bool, hybrid: bool, precision: str, cuts: st.DataObject,
) -> None:  # fmt: skip
    assume(virtual == 1 or pp > 1)
    layers = 32
    count = pp * virtual
    stages = None
    if cuts.draw(st.booleans(), label="uneven") and count > 1:
        inner = sorted(cuts.draw(st.sets(st.integers(2, layers), min_size=count - 1, max_size=count - 1), label="cuts"))
        stages = [
            StagePlan(first=first, last=last - 1) for first, last in zip([0, *inner], [*inner, layers + 2], strict=True)
        ]
    plan = decoder_plan(
        pp=pp, dp=dp, cp=cp, ep=ep if experts else 1, tp=tp, virtual_stages=virtual, layers=layers, kind=kind,
        num_microbatches=rounds * pp, microbatch_size=microbatch, zero=zero, experts=experts, precision=precision,
        schedule="interleaved" if virtual > 1 else "1f1b", shard=dp // 2 if hybrid and zero and dp > 2 else None,
        stages=stages, per_node=4,
    )  # fmt: skip
    check(plan, stub)


def test_a_plan_as_in_the_readme(stub: Path) -> None:
    plan = decoder_plan(
        dp=32, tp=2, zero=3, precision="bf16", num_microbatches=16, layers=80, sequence_parallel=True,
        stages=[StagePlan(first=0, last=81, remat={"selective": 46})],
    )  # fmt: skip
    args = check(plan, stub)
    assert (args.tensor_model_parallel_size, args.sequence_parallel, args.bf16, args.num_layers) == (2, True, True, 80)
    assert args.data_parallel_sharding_strategy == "optim_grads_params"
    assert args.recompute_granularity == "selective"
    assert any("keeps everything in some layers" in note for note in export(plan, "megatron").notes)


@pytest.mark.parametrize(
    ("choices", "degrees", "left"),
    [
        ({"ep": "d0&experts", "cp": "d1&experts", "tp": "d1&experts"}, (8, 1), ""),
        ({"ep": "d0&experts", "cp": "d1", "tp": "f"}, (2, 2), "leaves out cp"),
        ({"ep": "d0", "cp": "d1", "tp": "experts"}, (2, 1), ""),
        ({"ep": "d0&experts", "cp": "d1&experts", "tp": "d1"}, (4, 1), "leaves out tp"),
    ],
)
def test_experts_over_tensor_and_context_ranks(
    choices: dict[str, str], degrees: tuple[int, int], left: str, stub: Path
) -> None:
    plan = with_experts(decoder_plan(cp=2, ep=2, tp=2, experts=True, sequence_parallel=True), choices)
    args = check(plan, stub)
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == degrees
    notes = [note for note in export(plan, "megatron").notes if "neighbouring ranks" in note]
    assert bool(notes) is bool(left) and all(left in note for note in notes)


def test_uneven_stages_are_a_layout(stub: Path) -> None:
    stages = [StagePlan(first=0, last=1, remat={"full": 1}), StagePlan(first=2, last=4), StagePlan(first=5, last=9)]
    plan = decoder_plan(pp=3, stages=stages, num_microbatches=3, schedule="gpipe")
    args = check(plan, stub)
    assert args.pipeline_model_parallel_layout == "Et|t*3|t*4L"
    # One block is done again in full; the embedding, which comes first, is not a layer.
    assert args.recompute_granularity is None
    assert any("no gpipe" in note for note in export(plan, "megatron").notes)


def test_the_most_rematerialised_stage_decides(stub: Path) -> None:
    stages = [StagePlan(first=0, last=4, remat={"full": 3, "selective": 2}), StagePlan(first=5, last=9)]
    plan = decoder_plan(pp=2, stages=stages, num_microbatches=2)
    args = check(plan, stub)
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "block", 4)
    (note,) = [note for note in export(plan, "megatron").notes if "recomputes 4 layers in full" in note]
    assert "stage 0: 2 full, 0 alternate, 2 selective" in note


def test_a_zero_bubble_schedule_is_interleaved_and_said(stub: Path) -> None:
    plan = decoder_plan(pp=2, virtual_stages=2, num_microbatches=4, schedule="zb-v")
    check(plan, stub)
    notes = " ".join(export(plan, "megatron").notes)
    assert "Megatron has no zb-v" in notes and "turn at the last rank" in notes
    plan = decoder_plan(pp=2, num_microbatches=4, schedule="zb-2p")
    check(plan, stub)
    assert "The schedule is 1F1B: Megatron has no zb-2p." in " ".join(export(plan, "megatron").notes)


def test_rounds_of_more_microbatches_than_ranks(stub: Path) -> None:
    plan = decoder_plan(pp=4, virtual_stages=2, num_microbatches=6, schedule="interleaved")
    assert check(plan, stub).microbatch_group_size_per_virtual_pipeline_stage == 6
    few = decoder_plan(pp=4, virtual_stages=2, num_microbatches=3, schedule="interleaved")
    with pytest.raises(InexpressiblePlan, match="num_microbatches of 4"):
        export(few, "megatron")


def test_zero_with_a_pipeline_says_what_it_costs() -> None:
    exported = export(decoder_plan(pp=2, dp=2, zero=3, num_microbatches=2), "megatron")
    assert "--use-megatron-fsdp" not in exported.text
    assert any("ZeRO-1 instead of ZeRO-3" in note and "run out" in note for note in exported.notes)
    assert "ZeRO-1 instead of ZeRO-3" in exported.text


def test_a_stage_without_layers_is_refused() -> None:
    stages = [StagePlan(first=0, last=4), StagePlan(first=5, last=8), StagePlan(first=9, last=9)]
    export(decoder_plan(pp=3, stages=stages, num_microbatches=3), "megatron")
    plan = decoder_plan(pp=3, stages=stages, num_microbatches=3)
    tail = plan.blocks[2].model_copy(update={"name": "loss"})
    longer = plan.model_copy(update={"blocks": [*plan.blocks, tail], "stages": [
        StagePlan(first=0, last=8), StagePlan(first=9, last=9), StagePlan(first=10, last=10)]})  # fmt: skip
    with pytest.raises(InexpressiblePlan, match="stage 1 of the plan"):
        export(longer, "megatron")


def test_repeated_work_is_refused() -> None:
    plan = decoder_plan(dp=2)
    idle = plan.model_copy(update={"mesh": {**plan.mesh, "x": 2}})
    with pytest.raises(InexpressiblePlan, match="repeat each other's work, as on x 2"):
        export(idle, "megatron")


def test_names_are_no_shell_code(stub: Path, tmp_path: Path) -> None:
    name = f"x'$(touch {tmp_path}/broken)`\"\ntouch {tmp_path}/broken"
    check(decoder_plan(dp=2, name=name), stub)
    assert not (tmp_path / "broken").exists()
