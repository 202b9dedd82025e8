"""Mixtral 8x7B at its true size, from Hugging Face's own model code; needs no weights and no network.

autopar search examples/mixtral_8x7b.py --gpus 64 --gpu h100-sxm --global-batch 128 --seq 4096
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM


def config() -> MixtralConfig:
    """The published configuration."""
    return MixtralConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        sliding_window=None,
        tie_word_embeddings=False,
        use_cache=False,
    )


def model() -> nn.Module:
    """Parameters are float32 as everywhere; ``--precision bf16`` computes in bfloat16."""
    return MixtralForCausalLM(config())


def example_inputs(batch_size: int = 8, seq_len: int = 4096) -> dict[str, Tensor]:
    """One global batch; the model shifts the labels by one itself."""
    tokens = torch.zeros((batch_size, seq_len), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}
