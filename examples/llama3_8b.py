"""Llama 3 8B at its true size, from Hugging Face's own model code; needs no weights and no network.

autopar search examples/llama3_8b.py --gpus 8 --gpu h100-sxm --global-batch 64 --seq 8192
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def config() -> LlamaConfig:
    """The published configuration."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
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
