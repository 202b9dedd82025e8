"""Qwen3-30B-A3B, 128 experts of which each token takes 8, from Hugging Face's own model code; needs no weights.

autopar search examples/qwen3_30b_a3b.py --gpus 32 --gpu h100-sxm --global-batch 128 --seq 4096
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def config() -> Qwen3MoeConfig:
    """The published configuration."""
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        use_cache=False,
    )


def model() -> nn.Module:
    """Parameters are float32 as everywhere; ``--precision bf16`` computes in bfloat16."""
    return Qwen3MoeForCausalLM(config())


def example_inputs(batch_size: int = 8, seq_len: int = 4096) -> dict[str, Tensor]:
    """One global batch; the model shifts the labels by one itself."""
    tokens = torch.zeros((batch_size, seq_len), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}
