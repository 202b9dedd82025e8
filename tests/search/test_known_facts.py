"""Figures of large models that are known from the literature, as ``autopar estimate`` gives them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult

GB = 1e9
EXAMPLES = Path(__file__).parents[2] / "examples"


def gpt3() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96, n_head=96, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama_7b() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, max_position_embeddings=2048))


@cache
def captured(name: str, batch: int, seq: int) -> CapturedModel:
    with torch.device("meta"):
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        model = {"gpt3": gpt3, "llama_7b": llama_7b}[name]()
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
    return normalise(capture(model, inputs), check=False)


def numel(model: CapturedModel) -> int:
    return sum(p.numel for p in model.parameters.values())


def roomy(gpu: str, count: int) -> Cluster:
    return make_cluster(gpu, count).with_memory(1 << 50)


def estimate(model: CapturedModel, cluster: Cluster, **pinned: object) -> SearchResult:
    return estimate_captured(model, cluster, Constraints(precision="bf16", **pinned))  # type: ignore[arg-type]  # names of its fields


def test_six_flops_a_parameter_and_token() -> None:
    """175B parameters on 300B tokens: 3.15e23, and 3 to 4 % more for attention."""
    model = captured("gpt3", 4, 2048)
    assert numel(model) == pytest.approx(175e9, rel=0.01)
    total = Workload.of(model, "bf16").model_flops / (4 * 2048) * 300e9
    assert 1.0 < total / 3.15e23 < 1.06


def test_sixteen_bytes_a_parameter_before_activations() -> None:
    """And two for the copies that products of 16 bit read (docs/cost_model.md)."""
    model = captured("gpt3", 4, 2048)
    parts = max(estimate(model, roomy("a100", 1), num_microbatches=4).predicted.memory, key=lambda m: m.total)
    states = parts.parameters + parts.gradients + parts.optimizer
    assert states - 2 * numel(model) == pytest.approx(16 * numel(model), rel=1e-3)


def test_fsdp_of_7b_needs_well_under_half_of_what_ddp_does() -> None:
    model = captured("llama_7b", 8, 2048)
    ddp, fsdp = (estimate(model, roomy("a100", 8), zero=zero, num_microbatches=1) for zero in (0, 3))
    assert ddp.predicted.peak_bytes > 80 * GB
    assert fsdp.predicted.peak_bytes < 0.45 * ddp.predicted.peak_bytes
    with pytest.raises(InfeasiblePlan):
        estimate(model, make_cluster("a100", 8), zero=0, remat="none")
    assert estimate(model, make_cluster("a100", 8), zero=3).predicted.peak_bytes < 80 * GB


def test_70b_on_64_gpus_of_80_gb_fits_with_tp8_pp2_dp4() -> None:
    source = load_model_file(str(EXAMPLES / "llama3_70b.py"))
    model = normalise(capture(source.meta_model(), source.meta_inputs(512, 4096)), check=False)
    cluster = make_cluster("a100-80gb", 64)
    found = estimate(model, cluster, tp=8, pp=2, dp=4)
    assert (found.plan.num_ranks, found.plan.num_stages) == (64, 2)
    assert found.predicted.peak_bytes < cluster.device.usable_bytes
