"""The file is read by DeepSpeed's own configuration, which checks its fields and the batch, at the plan's ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.export import export
from autopar.export.strategy import Strategy
from autopar.ir.errors import InexpressiblePlan
from autopar.ir.plan import Plan, StagePlan
from tests.export.plans import decoder_plan

deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
deepspeed_zero = pytest.importorskip("deepspeed.runtime.zero.config")


class Ranks:
    """What DeepSpeed asks a model-parallel unit for."""

    def __init__(self, plan: Plan) -> None:
        self.data = Strategy(plan).data

    def get_data_parallel_world_size(self) -> int:
        return self.data


def load(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration as DeepSpeed reads it on every rank."""
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda group=None: plan.num_ranks)
    path = folder / "ds_config.json"
    path.write_text(export(plan, "deepspeed").text)
    given = json.loads(path.read_text())
    fields = deepspeed_zero.DeepSpeedZeroConfig.model_fields
    known = {field.alias or name for name, field in fields.items()}
    assert set(given["zero_optimization"]) <= known
    # Read here: DeepSpeed leaves a file that it reads open.
    return deepspeed_config.DeepSpeedConfig(given, mpu=Ranks(plan))


@given(
    dp=st.sampled_from((1, 2, 4, 8)), tp=st.sampled_from((1, 2)), zero=st.integers(0, 3),
    num=st.integers(1, 4), size=st.integers(1, 4), precision=st.sampled_from(("fp32", "bf16", "fp16")),
    offload=st.booleans(), reshard=st.booleans(),
)  # fmt: skip
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_deepspeed_reads_it(
    dp: int, tp: int, zero: int, num: int, size: int, precision: str, offload: bool, reshard: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tp = 1 if zero == 3 else tp
    plan = decoder_plan(
        dp=dp, tp=tp, zero=zero, num_microbatches=num, microbatch_size=size, precision=precision,
        stages=[StagePlan(first=0, last=9, offload=offload and zero > 0)],
        reshard_after_forward=reshard or zero < 3,
    )  # fmt: skip
    config = load(plan, tmp_path, monkeypatch)
    assert config.train_batch_size == plan.batch.global_size
    assert config.train_micro_batch_size_per_gpu == size
    assert config.gradient_accumulation_steps == num
    assert config.zero_config.stage == zero
    offloaded = config.zero_config.offload_optimizer
    assert (offloaded is not None) == (offload and zero > 0)
    assert (config.zero_config.offload_param is not None) == (offload and zero == 3)
    if zero == 3:
        assert (config.zero_config.max_reuse_distance > 10**12) is not reshard
    assert config.tensor_parallel_config.autotp_size == (tp if tp > 1 else 0)


def test_precision_and_hybrid_sharding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(decoder_plan(dp=8, zero=3, shard=4, precision="bf16"), tmp_path, monkeypatch)
    assert config.zero_config.zero_hpz_partition_size == 4
    given = json.loads(export(decoder_plan(dp=8, precision="bf16"), "deepspeed").text)
    assert given["bf16"] == {"enabled": True} and given["data_types"] == {"grad_accum_dtype": "fp32"}
    notes = export(decoder_plan(dp=8, zero=2, shard=4), "deepspeed").notes
    assert any("all 8 data ranks; the plan over 4" in note for note in notes)


def test_sequences_shared_by_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decoder_plan(dp=2, cp=4, kind="heads", num_microbatches=2)
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda group=None: plan.num_ranks)
    config = deepspeed_config.DeepSpeedConfig(json.loads(export(plan, "deepspeed").text))
    assert config.train_batch_size == 4


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"pp": 2}, "a pipeline"),
        ({"ep": 2, "experts": True}, "expert parallelism"),
        ({"cp": 2}, "shares sequences by heads"),
        ({"tp": 2, "zero": 3}, "ZeRO up to stage 2"),
        ({"tp": 2, "cp": 2, "kind": "heads"}, "no AutoTP and Ulysses at once"),
    ],
)
def test_what_deepspeed_has_not_is_refused(others: dict[str, Any], words: str) -> None:
    with pytest.raises(InexpressiblePlan, match=words) as refused:
        export(decoder_plan(dp=2, num_microbatches=2, **others), "deepspeed")
    assert "try: " in str(refused.value)
