"""Llama 3.1 405B at its true size, from Hugging Face's own model code; needs no weights and no network.

autopar search examples/llama31_405b.py --gpus 16384 --gpu h100-sxm --global-batch 2048 --seq 8192
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def config() -> LlamaConfig:
    """The published configuration."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        use_cache=False,
    )


def model() -> nn.Module:
    """Parameters are float32 as everywhere; ``--precision bf16`` computes in bfloat16."""
    return LlamaForCausalLM(config())


def example_inputs(batch_size: int = 8, seq_len: int = 8192) -> dict[str, Tensor]:
    """One global batch; the model shifts the labels by one itself."""
    tokens = torch.zeros((batch_size, seq_len), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}
