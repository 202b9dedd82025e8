"""Rows of published runs are read by what they state, whatever they are called."""

from __future__ import annotations

import pytest
import torch

from autopar.cost_model.stacks.known import MEGATRON_CORE, MEGATRON_CORE_2025
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InvalidCluster
from autopar.ir.plan import Plan, StagePlan
from autopar.passes.normalise import normalise
from benchmarks.published_predictions import devices_of, every_other_block_again, under_its_plan
from benchmarks.published_rows import Missing, Row

transformers = pytest.importorskip("transformers")

# A gated decoder with 8 billion parameters on one node.
CELLS = {
    "id": "somebody-001", "source": "a page", "model": "a model", "params_b": "8", "layers": "32", "hidden": "4096",
    "ffn_hidden": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "seq_len": "8192", "experts": "",
    "top_k": "", "gpu": "H100-96GB-HBM2e", "n_gpus": "8", "tp": "1", "sp": "", "cp": "1", "pp": "1", "vpp": "",
    "ep": "", "dp": "8", "zero_stage_or_fsdp": "fsdp", "micro_batch": "2", "global_batch": "16", "precision": "bf16",
    "recompute": "none", "schedule": "", "reported_metric": "tokens_per_s_per_gpu", "reported_value": "4096",
    "notes": "",
}  # fmt: skip


def row(**cells: str) -> Row:
    assert cells.keys() <= CELLS.keys()
    return Row({**CELLS, **cells})


def test_a_row_that_says_all() -> None:
    given = row()
    assert given.unprinted == ()
    assert given.reported() == 16 * 8192 / (4096 * 8)
    constraints = given.constraints()
    assert (constraints.dp, constraints.tp, constraints.pp, constraints.zero) == (8, 1, 1, 3)
    assert constraints.num_microbatches == 1
    assert devices_of(given).device.name == "H100-96GB"


@pytest.mark.parametrize(
    ("cells", "shape"),
    [
        ({}, "gated"),
        ({"kv_heads": "32", "params_b": "8.9"}, "gated"),
        ({"kv_heads": "", "params_b": "6.6"}, "plain"),
        ({"experts": "8", "top_k": "2", "params_b": "47.5"}, "experts"),
        ({"params_b": "7.5"}, "tied"),
        ({"params_b": "6.2"}, "ungated"),
    ],
)
def test_the_shape_is_that_of_so_many_parameters(cells: dict[str, str], shape: str) -> None:
    assert row(**cells).shape == shape


def test_a_shape_that_the_columns_do_not_describe_is_left_out() -> None:
    with pytest.raises(Missing, match=r"sizes that add up to its parameters \(8.03b of 13b\)"):
        _ = row(params_b="13").shape


def test_what_of_a_plan_is_not_printed_is_open() -> None:
    given = row(n_gpus="64", dp="4", tp="", pp="", zero_stage_or_fsdp="none")
    assert given.unprinted == ("tp", "pp")
    assert (given.constraints().tp, given.constraints().pp, given.constraints().dp) == (None, None, 4)
    given = row(n_gpus="64", tp="8", pp="4", dp="2", schedule="interleaved-1F1B")
    assert given.unprinted == ("vpp",)
    assert (given.constraints().schedule, given.constraints().virtual_stages) == ("interleaved", None)
    assert row(tp="", pp="").unprinted == (), "one rank a copy leaves nothing open"
    assert row(micro_batch="").unprinted == ("micro_batch",)


@pytest.mark.parametrize(
    ("cells", "fused"),
    [
        ({"source": "Narayanan et al. SC21"}, False),
        ({"source": "a paper of 2022, arXiv 2205.05198"}, False),
        ({"source": "benchmarks/llama3_h100_202412.md @152aab304d"}, True),
        ({"source": "a report of 2024 on a model of 2021"}, True),
    ],
)
def test_attention_is_fused_from_2023_on(cells: dict[str, str], fused: bool) -> None:
    assert row(**cells).origin.fused_attention is fused


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"source": "a report of 2021"}, "megatron-lm-2021"),
        ({"source": "a report of 2023"}, "megatron-lm-2022"),
        ({"source": "tables of release 24.11"}, "megatron-core-2024"),
        ({"source": "a page"}, "megatron-core-2025"),
        ({"source": "pytorch/torchtitan", "notes": "torch.compile"}, "torchtitan-2024"),
        ({"source": "pytorch/torchtitan", "notes": "FSDP2, eager"}, "torchtitan-2024-eager"),
        ({"source": "pytorch/torchtitan", "notes": "async TP, torch.compile"}, "torchtitan-2024-async-tp"),
        ({"source": "NVIDIA, release 24.11", "notes": "MaxText/JAX"}, "maxtext-2024"),
    ],
)
def test_software_is_what_the_row_names_or_of_its_year(cells: dict[str, str], stack: str) -> None:
    assert row(**cells).stack.name == stack
    assert devices_of(row(**cells, gpu="h100-sxm", n_gpus="8")).device.stack.name == stack


LAUNCHER = {"source": "NVIDIA/NeMo-Framework-Launcher examples/README.md (Mar 2024)"}
DGXC = "NVIDIA/dgxc-benchmarking @v24.11.1"


def test_recipes_say_what_their_runs_switched_on() -> None:
    assert row(**LAUNCHER).stack.name == "megatron-core-2024-flash"
    assert row(source=f"{DGXC} grok1/README_314b.md").stack.name == "megatron-core-2024-flash"
    llama = row(source=f"{DGXC} llama3.1/README_8b.md").stack
    assert llama.name == "megatron-core-2024"
    assert llama.extra_bytes == MEGATRON_CORE_2025.extra_bytes != MEGATRON_CORE.extra_bytes
    assert row(**LAUNCHER, model="gpt3-5b").dropout == 0.1
    assert row(**LAUNCHER, model="llama2-7b").dropout == row(source="a page", model="gpt3-5b").dropout == 0.0


BRIDGE = {"source": "Megatron-Bridge, NeMo 25.11", "experts": "8", "top_k": "2", "params_b": "", "vpp": "1"}


def test_whole_experts_are_divided_over_tensor_ranks_as_over_data_ranks() -> None:
    shared = {"n_gpus": "16", "tp": "2", "dp": "8", "ep": "8", "zero_stage_or_fsdp": "zero1"}
    given = row(**{**BRIDGE, **shared})
    assert (given.constraints().ep, given.constraints().dp, given.constraints().tp) == (4, 2, 2)
    given = row(**{**BRIDGE, **shared, "source": "tables of release 24.11"})
    assert (given.constraints().ep, given.constraints().dp) == (8, 1), "experts that are divided themselves"
    with pytest.raises(Missing, match=r"an expert degree that its tensor ranks divide \(ep 8, tp 16\)"):
        row(**{**BRIDGE, "n_gpus": "128", "tp": "16", "dp": "8", "ep": "8"}).constraints()


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"model": "deepseek-v3", "vpp": "4"}, "megatron-core-2025-deepep"),
        ({"model": "qwen3-30b-a3b", "vpp": "4"}, "megatron-core-2025-overlap"),
        ({"model": "qwen3-30b-a3b", "vpp": "1"}, "megatron-core-2025"),
        ({"model": "qwen3-30b-a3b", "vpp": "4", "notes": "table variant: tokendrop"}, "megatron-core-2025"),
        ({"model": "qwen3-30b-a3b", "vpp": "4", "gpu": "GB200", "n_gpus": "64"}, "megatron-core-2025"),
    ],
)
def test_dispatch_runs_beside_another_microbatch_where_recipes_have_it(cells: dict[str, str], stack: str) -> None:
    assert row(**{**BRIDGE, "pp": "2", **cells}).stack.name == stack


def test_tokens_are_dispatched_to_whole_experts() -> None:
    given = row(
        **BRIDGE, layers="2", hidden="256", ffn_hidden="128", heads="4", kv_heads="4", vocab="512", seq_len="128",
        dp="8", ep="8", zero_stage_or_fsdp="zero1", micro_batch="1", global_batch="8", gpu="h100-sxm",
    )  # fmt: skip
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            vocab_size=512, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=8, use_cache=False,
        )  # fmt: skip
        built, tokens = transformers.MixtralForCausalLM(config), torch.zeros((8, 128), dtype=torch.long)
    captured = normalise(capture(built, {"input_ids": tokens, "labels": tokens.clone()}))
    placed = [block.ops for block in under_its_plan(given, captured).plan.blocks]
    experts = [op["ep"] for ops in placed for name, op in ops.items() if name.rpartition("/")[2].startswith("moe")]
    assert experts == ["d0&experts"]


@pytest.mark.parametrize(
    ("source", "year"),
    [
        ("arXiv 2205.05198 Table 5", 22),
        ("@v24.11.1 README", 24),
        ("h100_202412_torchtitan.md", 24),
        ("SC21 Table 1", 21),
    ],
)
def test_the_year_of_a_source_is_in_its_name(source: str, year: int) -> None:
    assert row(source=source).origin.year == year


def test_a_table_without_a_year_is_of_its_software() -> None:
    assert row(source="mosaicml/llm-foundry scripts/train/benchmarking/README.md @8c8dd48f7").origin.year == 23
    assert row(source="mosaicml/llm-foundry, a report of 2025").origin.year == 25
    assert row(source="a page").origin.year == 99


@pytest.mark.parametrize(
    ("kind", "alone", "piped"),
    [
        ("none", (0, None), (0, None)),
        ("zero1", (1, None), (1, None)),
        ("zero3", (3, None), (3, None)),
        ("fsdp", (3, None), (1, None)),
        ("fsdp (no reshard after forward)", (3, False), (1, None)),
    ],
)
def test_in_a_pipeline_fsdp_gathers_once_a_step(
    kind: str, alone: tuple[int, bool | None], piped: tuple[int, bool | None]
) -> None:
    given = row(zero_stage_or_fsdp=kind).constraints()
    assert (given.zero, given.reshard_after_forward) == alone
    given = row(zero_stage_or_fsdp=kind, n_gpus="64", tp="8", pp="4", dp="2", vpp="1").constraints()
    assert (given.zero, given.reshard_after_forward) == piped


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [
        *(("bf16", None), ("fp8", "fp8-tensor"), ("fp8-cs", "fp8-tensor"), ("fp8 rowwise", "fp8-row")),
        *(("mxfp8", "mxfp8"), ("fp8-mx", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8 blockwise", "fp8-block")),
    ],
)
def test_products_in_8_bits_are_of_the_recipe_that_is_named(precision: str, recipe: str | None) -> None:
    given = row(precision=precision).constraints()
    assert (given.precision, given.recipes) == ("bf16", (recipe,))


@pytest.mark.parametrize(
    ("source", "printed", "sequence"),
    [("NeMo 24.07", "", True), ("NeMo 24.07", "0", False), ("SC21", "", False), ("SC21", "1", True)],
)
def test_tensor_ranks_of_nemo_share_sequences_unless_it_says_otherwise(
    source: str, printed: str, sequence: bool
) -> None:
    one = row(source=source, tp="4", dp="2", sp=printed, global_batch="16", zero_stage_or_fsdp="zero1")
    assert one.constraints().sequence_parallel is sequence


def test_what_is_missing_is_said() -> None:
    for cells, said in (
        ({"global_batch": "4M tokens"}, "global_batch as a number"),
        ({"global_batch": ""}, "global_batch"),
        ({"reported_metric": "loss"}, "seconds"),
        ({"reported_value": "about 5"}, "figure as a number"),
    ):
        with pytest.raises(Missing, match=said):
            row(**cells).reported()
    with pytest.raises(Missing, match="heads that divide"):
        _ = row(heads="30", kv_heads="30").shape
    with pytest.raises(Missing, match="precision"):
        row(precision="int8").constraints()
    with pytest.raises(Missing, match="expert degree"):
        row(ep="16").constraints()
    with pytest.raises(InvalidCluster):
        devices_of(row(gpu="an abacus"))


def test_a_small_vocabulary_does_not_have_to_be_printed() -> None:
    assert row(vocab="", params_b="530", hidden="20480").vocabulary == 51_200
    with pytest.raises(Missing, match="vocab"):
        _ = row(vocab="").vocabulary


def test_a_vocabulary_that_is_not_printed_is_the_usual_one_where_the_parameters_add_up_with_it() -> None:
    sizes = {"layers": "22", "hidden": "2304", "ffn_hidden": "9216", "heads": "24", "kv_heads": "24", "vocab": ""}
    assert row(**sizes, params_b="1.5").vocabulary == 51_200
    with pytest.raises(Missing, match="vocab"):
        _ = row(**sizes, params_b="2.0").vocabulary


def test_utilisation_is_of_the_datasheet_as_the_source_counts_it() -> None:
    seconds = row(reported_metric="mfu", reported_value="40").reported()
    tokens, active, attention = 16 * 8192, 8e9, 32 * 4096 * 8192
    assert seconds == pytest.approx(tokens * 6 * (active + attention) / (0.4 * 989e12 * 8))
    full = row(reported_metric="mfu", reported_value="40", source="huggingface/nanotron docs").reported()
    assert full == pytest.approx(tokens * 6 * (active + 2 * attention) / (0.4 * 989e12 * 8))


def test_a_rate_that_float32_cannot_reach_is_of_16_bits() -> None:
    assert row(precision="", reported_value="6000").constraints().precision == "bf16"
    with pytest.raises(Missing, match="precision"):
        row(precision="", reported_value="600").constraints()


def test_how_state_is_divided_is_read_or_asked_for() -> None:
    hybrid = row(zero_stage_or_fsdp="hsdp", notes="JAX; FSDP shard group 4; rest data parallel").constraints()
    assert (hybrid.zero, hybrid.shard) == (3, 4)
    assert row(zero_stage_or_fsdp="zero2").constraints().zero == 2
    with pytest.raises(Missing, match=r"divides the state of data-parallel ranks \(fsdp\+dp\)"):
        row(zero_stage_or_fsdp="fsdp+dp").constraints()


def test_schedules_of_split_backwards() -> None:
    piped = {"n_gpus": "64", "dp": "8", "pp": "8", "vpp": "1", "zero_stage_or_fsdp": "none"}
    assert row(**piped, schedule="ZB-1p").constraints().schedule == "zb-h1"
    assert row(**piped, schedule="ZB-2p").constraints().schedule == "zb-2p"
    with pytest.raises(Missing, match="ZB-H3"):
        row(**piped, schedule="ZB-H3").constraints()


def test_part_of_a_rack_is_a_smaller_node() -> None:
    assert devices_of(row(gpu="GB200", n_gpus="256")).gpus_per_node == 64
    assert devices_of(row(gpu="GB200", n_gpus="144")).gpus_per_node == 72


def test_every_other_block() -> None:
    plan = Plan.model_construct(stages=[StagePlan(first=0, last=8), StagePlan(first=9, last=12)], prediction=None)
    assert [stage.remat for stage in every_other_block_again(plan).stages] == [{"full": 4}, {"full": 2}]
