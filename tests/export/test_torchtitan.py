"""The module is executed, on torchtitan's own classes where they can be imported, and on stand-ins for them elsewhere.

``make torchtitan`` installs torchtitan 0.3, which needs Python 3.11, and lets its own parser read the module too. The
stand-ins have its fields.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field, make_dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autopar.export import export
from autopar.ir.errors import InexpressiblePlan
from autopar.ir.plan import Plan, StagePlan
from tests.export.plans import decoder_plan

# Of TrainingConfig and ParallelismConfig in torchtitan/config/configs.py, release 0.3.0.
TRAINING = """local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload disable_cuda_graphs dtype
    mixed_precision_param mixed_precision_reduce gc_freq gc_debug"""
PARALLELISM = """data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
    enable_fsdp_symm_mem tensor_parallel_degree enable_sequence_parallel spmd_backend pipeline_parallel_degree
    module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
    pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv
    pipeline_parallel_microbatch_size context_parallel_degree context_parallel_load_balancer
    context_parallel_ptrr_mask_key expert_parallel_degree"""


def stand_ins() -> dict[str, ModuleType]:
    def settings(name: str, fields: str) -> type:
        return make_dataclass(name, [(one, Any, field(default=None)) for one in fields.split()], kw_only=True)

    of_training, of_ranks = settings("TrainingConfig", TRAINING), settings("ParallelismConfig", PARALLELISM)

    @dataclass(kw_only=True)
    class Config:
        training: Any = field(default_factory=of_training)
        parallelism: Any = field(default_factory=of_ranks)
        activation_checkpoint: Any = None

    names = (
        "torchtitan",
        "torchtitan.distributed",
        "torchtitan.distributed.activation_checkpoint",
        "torchtitan.trainer",
    )
    found = {name: ModuleType(name) for name in (*names, "titan_base.registry")}
    for policy in ("FullAC", "SelectiveAC"):
        setattr(found[names[2]], policy, type(policy, (), {"Config": make_dataclass(policy, [])}))
    found[names[3]].Trainer = type("Trainer", (), {"Config": Config})  # type: ignore[attr-defined]
    found["titan_base.registry"].model = Config  # type: ignore[attr-defined]
    return found


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> str:
    """BASE of a configuration."""
    try:
        importlib.import_module("torchtitan.trainer")
        base = "llama3:llama3_debugmodel"
    except ImportError:
        for name, module in stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
        base = "titan_base.registry:model"
    monkeypatch.setenv("BASE", base)
    return base


def configured(plan: Plan) -> Any:
    module = ModuleType("torchtitan_plan")
    exec(export(plan, "torchtitan").text, module.__dict__)
    return module.plan()


@pytest.mark.parametrize("pp", [1, 2])
def test_torchtitans_own_command_line_reads_it(pp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("torchtitan.config.manager", reason="make torchtitan")
    plan = decoder_plan(pp=pp, dp=4, tp=2, zero=3, num_microbatches=4, microbatch_size=2)
    written = export(plan, "torchtitan")
    (tmp_path / written.name).write_text(written.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchtitan_plan", raising=False)
    monkeypatch.setenv("BASE", "llama3:llama3_debugmodel")
    arguments = ["--module", "torchtitan_plan", "--config", "plan", "--training.steps", "7"]
    found = manager.ConfigManager().parse_args(arguments)
    ranks = found.parallelism
    assert (ranks.pipeline_parallel_degree, ranks.data_parallel_shard_degree, ranks.tensor_parallel_degree) == (
        pp,
        4,
        2,
    )
    assert (found.training.steps, found.training.global_batch_size) == (7, plan.batch.global_size)


@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), list(product((1, 2), (1, 4), (1, 2), (1, 2))))
@pytest.mark.parametrize(("zero", "shard"), [(0, None), (2, None), (3, 2)])
def test_degrees_multiply_to_the_ranks(
    pp: int, dp: int, cp: int, tp: int, zero: int, shard: int | None, titan: str
) -> None:
    plan = decoder_plan(
        pp=pp, dp=dp, cp=cp, tp=tp, zero=zero, shard=shard if dp > 1 else None, num_microbatches=4, microbatch_size=2
    )  # fmt: skip
    config = configured(plan)
    ranks, training = config.parallelism, config.training
    replicate, data = ranks.data_parallel_replicate_degree, ranks.data_parallel_shard_degree
    dense = replicate * data * ranks.context_parallel_degree * ranks.tensor_parallel_degree
    assert dense * ranks.pipeline_parallel_degree == plan.num_ranks
    assert (replicate, data) == ((1, dp) if zero == 2 else (dp, 1) if not zero or dp == 1 else (dp // 2, 2))
    per_step = training.local_batch_size * replicate * data
    accumulated = training.global_batch_size // per_step
    assert training.global_batch_size == plan.batch.global_size == accumulated * per_step
    pieces = training.local_batch_size // ranks.pipeline_parallel_microbatch_size if pp > 1 else 1
    assert accumulated * pieces == plan.batch.num_microbatches
    assert ranks.fsdp_reshard_after_forward == ("always" if zero == 3 else "never")


def test_uneven_stages_are_lists_of_modules(titan: str) -> None:
    stages = [StagePlan(first=0, last=1), StagePlan(first=2, last=4), StagePlan(first=5, last=9)]
    plan = decoder_plan(pp=3, stages=stages, num_microbatches=3)
    assert configured(plan).parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3"],
        ["layers.4", "layers.5", "layers.6", "layers.7", "norm", "lm_head"],
    ]


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [("1f1b", 1, "1F1B"), ("gpipe", 1, "GPipe"), ("interleaved", 2, "Interleaved1F1B"), ("zb-v", 2, "ZBVZeroBubble"),
     ("dualpipe-v", 2, "DualPipeV"), ("zb-h1", 2, "InterleavedZeroBubble"), ("zb-h1", 1, "1F1B"), ("zb-2p", 1, "1F1B"),
     ("naive", 1, "1F1B")],
)  # fmt: skip
def test_schedules_are_torchs(schedule: str, virtual: int, expected: str, titan: str) -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    plan = decoder_plan(pp=2, virtual_stages=virtual, num_microbatches=4, schedule=schedule)
    assert configured(plan).parallelism.pipeline_parallel_schedule == expected
    assert issubclass(get_schedule_class(expected), PipelineScheduleMulti) == (virtual > 1)
    said = any(f"torchtitan has no {schedule}" in note for note in export(plan, "torchtitan").notes)
    assert said == (schedule in ("naive", "zb-h1", "zb-2p") and virtual == 1)


@pytest.mark.parametrize(
    ("remat", "expected", "exact"),
    [({}, None, True), ({"full": 10}, "FullAC", True), ({"full": 4}, "FullAC", False),
     ({"alternate": 10}, "SelectiveAC", True), ({"selective": 10}, "SelectiveAC", False)],
)  # fmt: skip
def test_activation_checkpointing(remat: dict[str, int], expected: str | None, exact: bool, titan: str) -> None:
    plan = decoder_plan(dp=2, stages=[StagePlan(first=0, last=9, remat=remat)])
    found = configured(plan).activation_checkpoint
    assert (None if found is None else type(found).__qualname__.partition(".")[0]) == expected
    assert any("checkpointed alike" in note for note in export(plan, "torchtitan").notes) != exact


def test_rounds_that_torch_has_not_are_refused() -> None:
    with pytest.raises(InexpressiblePlan, match=r"5 microbatches on 2 ranks in 2 rounds of one size.\n  try: .* of 4,"):
        export(decoder_plan(pp=2, virtual_stages=2, num_microbatches=5, schedule="interleaved"), "torchtitan")


def test_recomputation_in_each_part_of_a_split_backward_is_said(titan: str) -> None:
    for schedule, said in (("interleaved", False), ("zb-v", True)):
        plan = decoder_plan(pp=2, virtual_stages=2, num_microbatches=4, schedule=schedule)
        stages = [stage.model_copy(update={"remat": {"full": 1}}) for stage in plan.stages]
        notes = export(plan.model_copy(update={"stages": stages}), "torchtitan").notes
        assert any("recomputes a checkpointed block in each part" in note for note in notes) == said


def test_experts_share_a_shard(titan: str) -> None:
    plan = decoder_plan(dp=2, ep=4, experts=True, zero=3)
    assert configured(plan).parallelism.expert_parallel_degree == 4
    with pytest.raises(InexpressiblePlan, match="divides experts over ranks that share a shard"):
        export(decoder_plan(dp=2, ep=4, experts=True), "torchtitan")


def test_sequences_and_precision(titan: str) -> None:
    config = configured(decoder_plan(cp=4, sequence_layout="zigzag", precision="fp16"))
    assert config.parallelism.context_parallel_load_balancer == "headtail"
    assert config.training.mixed_precision_param == "bfloat16"
    assert configured(decoder_plan(cp=4)).parallelism.context_parallel_load_balancer is None


def test_without_a_base_nothing_is_trained(titan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASE")
    with pytest.raises(SystemExit, match="set BASE"):
        configured(decoder_plan(dp=2))
