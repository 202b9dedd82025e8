"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from models import translation_batch

from .building import SMALL, hugging_face
from .encoder_decoders import _BART, _T5

_MOE: dict[str, Any] = {**SMALL, "moe_intermediate_size": 16, "num_experts_per_tok": 2}


def _masked(step: int) -> dict[str, Any]:
    batch = translation_batch(step)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


MOE_MODELS = (
    # Sinks in attention; gate and up interleaved and clamped; biases of experts.
    hugging_face("gpt_oss", "GptOssForCausalLM", **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                 sliding_window=8),
    # A shared expert with a gate of its own.
    hugging_face("qwen2_moe", "Qwen2MoeForCausalLM", **_MOE, num_experts=4, shared_expert_intermediate_size=32),
    hugging_face("granitemoe", "GraniteMoeForCausalLM", **SMALL, num_local_experts=4, num_experts_per_tok=2),
    hugging_face("phimoe", "PhimoeForCausalLM", **SMALL, num_local_experts=4, num_experts_per_tok=2,
                 router_jitter_noise=0.0, input_jitter_noise=0.0),
    hugging_face("glm4_moe", "Glm4MoeForCausalLM", **_MOE, head_dim=8, n_routed_experts=4, n_shared_experts=1,
                 first_k_dense_replace=1, n_group=1, topk_group=1),
    hugging_face("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", **SMALL, moe_intermediate_size=16, moe_num_experts=4,
                 moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1),
    # One expert a token, dropped where an expert has no room.
    hugging_face("switch_transformers", "SwitchTransformersForConditionalGeneration", _masked, **_T5,
                 num_experts=4, expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
                 router_jitter_noise=0.0),
    hugging_face("nllb_moe", "NllbMoeForConditionalGeneration", translation_batch, **_BART, num_experts=4,
                 encoder_sparse_step=2, decoder_sparse_step=2, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
                 expert_capacity=64, moe_token_dropout=0.0, router_jitter_noise=0.0),
)  # fmt: skip
