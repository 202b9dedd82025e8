"""Tensor parallelism divides the work of transformers of any family, and their matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured
from autopar.search.divided_share import ENOUGH, divided_flops
from autopar.search.problem.constraints import Constraints

B, S, VOCAB = 2, 8, 32
_DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False, "head_dim": 8,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_labels": 4,
}  # fmt: skip
_SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False, "vocab_size": VOCAB}
_BOTH = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "use_cache": False,
}  # fmt: skip

# What is special about a family -> a model and its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "alibi": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
    "multi-query": ("FalconForCausalLM", {**_ENCODER, "multi_query": True, "parallel_attn": True, "use_cache": False}),
    "sinks": (
        "GptOssForCausalLM",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "disentangled": (
        "DebertaV2ForMaskedLM",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
    "patches": ("ViTForImageClassification", _IMAGE),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", {**_ENCODER, "use_cache": False}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {**_SMALL, "multi_query": True}),
    "codegen": ("CodeGenForCausalLM", {**_SMALL, "rotary_dim": 4, "n_ctx": 32}),
    "gptj": ("GPTJForCausalLM", {**_SMALL, "rotary_dim": 4}),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "use_cache": False},
    ),
    "xglm": (
        "XGLMForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "use_cache": False},
    ),
    "deberta": (
        "DebertaForMaskedLM",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
    "roformer": ("RoFormerForMaskedLM", _ENCODER),
    "electra": ("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 16}),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 4},
    ),
    "beit": ("BeitForImageClassification", _IMAGE),
    "bart": ("BartForConditionalGeneration", _BOTH),
    "m2m_100": ("M2M100ForConditionalGeneration", {**_BOTH, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "granite": ("GraniteMoeForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie": (
        "Ernie4_5_MoeForCausalLM",
        {**_DECODER, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {**_DECODER, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
}


def _share(name: str, sizes: dict[str, Any]) -> float:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**sizes))
        tokens = torch.zeros((B, S), dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
        if "image_size" in sizes:
            side = sizes["image_size"]
            inputs = {"pixel_values": torch.zeros(B, 3, side, side), "labels": tokens[:, 0]}
    captured = normalise(capture(model, inputs), check=False)
    found = estimate_captured(captured, make_cluster("h100-sxm", 2, 8), Constraints(tp=2))
    return divided_flops(captured, found.plan, "tp", workload=found.workload).share


@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallelism_divides_a_family(name: str) -> None:
    assert _share(*FAMILIES[name]) >= ENOUGH


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_tensor_parallelism_divides_more_families(name: str) -> None:
    assert _share(*MORE[name]) >= ENOUGH
