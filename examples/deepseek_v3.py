"""DeepSeek-V3 at its true size (671 billion parameters, 256 experts), from Hugging Face's own model code.

autopar search examples/deepseek_v3.py --gpus 256 --gpu h100-sxm --global-batch 1024 --seq 4096
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def config() -> DeepseekV3Config:
    """The published configuration, which is the class's default, without multi-token prediction."""
    return DeepseekV3Config(use_cache=False)


def model() -> nn.Module:
    """Parameters are float32 as everywhere; ``--precision bf16`` computes in bfloat16."""
    return DeepseekV3ForCausalLM(config())


def example_inputs(batch_size: int = 8, seq_len: int = 4096) -> dict[str, Tensor]:
    """One global batch; the model shifts the labels by one itself."""
    tokens = torch.zeros((batch_size, seq_len), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}
