"""The file is read by Accelerate, which refuses unknown fields, and made into what ``accelerate launch`` passes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.export import export
from autopar.ir.errors import InexpressiblePlan
from autopar.ir.plan import Plan, StagePlan
from tests.export.plans import decoder_plan

config_args = pytest.importorskip("accelerate.commands.config.config_args")
launch = pytest.importorskip("accelerate.commands.launch")
launchers = pytest.importorskip("accelerate.utils.launch")
parallelism = pytest.importorskip("accelerate.parallelism_config")


def load(plan: Plan, folder: Path) -> tuple[Any, dict[str, str]]:
    """The configuration, and the environment that the launcher sets from it."""
    path = folder / "accelerate.yaml"
    path.write_text(export(plan, "accelerate").text)
    found = config_args.load_config_from_file(str(path))
    assert type(found) is config_args.ClusterConfig
    parser = launch.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(found.deepspeed_config)  # as the command does
        _, environment = launchers.prepare_deepspeed_cmd_env(arguments)
    elif arguments.num_processes > 1:
        environment = launchers.prepare_multi_gpu_env(arguments)
    else:
        _, environment = launchers.prepare_simple_launcher_cmd_env(arguments)
    return found, environment


def test_ddp(tmp_path: Path) -> None:
    config, environment = load(decoder_plan(dp=16, precision="bf16", num_microbatches=4, microbatch_size=2), tmp_path)
    assert (config.distributed_type, config.num_processes, config.num_machines) == ("MULTI_GPU", 16, 2)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    exported = export(decoder_plan(dp=16, num_microbatches=4, microbatch_size=2), "accelerate")
    assert "Accelerator(gradient_accumulation_steps=4)" in exported.notes[0]
    assert "Accelerator(gradient_accumulation_steps=4)" in exported.text


@pytest.mark.parametrize("zero", [1, 2])
def test_deepspeed(zero: int, tmp_path: Path) -> None:
    stages = [StagePlan(first=0, last=9, offload=True)]
    config, environment = load(decoder_plan(dp=4, zero=zero, num_microbatches=3, stages=stages), tmp_path)
    assert config.distributed_type == "DEEPSPEED"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(zero)
    assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(reshard: bool, tmp_path: Path) -> None:
    config, environment = load(decoder_plan(dp=8, zero=3, reshard_after_forward=reshard), tmp_path)
    assert config.distributed_type == "FSDP"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"].lower() == str(reshard).lower()
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


@pytest.mark.parametrize(
    ("others", "sizes"),
    [
        ({"dp": 8, "zero": 3, "shard": 4}, (2, 4, 1, 1)),
        ({"dp": 4, "tp": 2, "zero": 3}, (1, 4, 2, 1)),
        ({"dp": 2, "cp": 4, "zero": 3}, (1, 2, 1, 4)),
        ({"dp": 4, "tp": 2}, (1, 4, 2, 1)),
    ],
)
def test_axes(others: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decoder_plan(**others)
    _, environment = load(plan, tmp_path)
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    for name, value in environment.items():
        if name.startswith("PARALLELISM_CONFIG"):
            monkeypatch.setenv(name, value)
    found = parallelism.ParallelismConfig()
    assert (found.dp_replicate_size, found.dp_shard_size, found.tp_size, found.cp_size) == sizes
    assert found.total_size == plan.num_ranks


def test_cpus_and_one_rank(tmp_path: Path) -> None:
    config = yaml.safe_load(export(decoder_plan(dp=2, gpu="cpu"), "accelerate").text)
    assert (config["distributed_type"], config["use_cpu"]) == ("MULTI_CPU", True)
    assert yaml.safe_load(export(decoder_plan(), "accelerate").text)["distributed_type"] == "NO"


@pytest.mark.parametrize(("others", "words"), [({"pp": 2}, "a pipeline"), ({"ep": 2, "experts": True}, "expert")])
def test_what_accelerate_has_not_is_refused(others: dict[str, Any], words: str) -> None:
    with pytest.raises(InexpressiblePlan, match=words):
        export(decoder_plan(dp=2, num_microbatches=2, **others), "accelerate")
