"""Models of the shapes that published runs state, from Hugging Face's code."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normal_form
from autopar.passes.normalise.eager_attention import FuseEagerAttention
from autopar.passes.pipeline import run_passes
from benchmarks.published_rows import NAMED, Row


def unfused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """The kernels that Megatron-LM ran: two products, between them softmax (scale and mask in it) and dropout."""
    weights = functional.dropout(torch.softmax(query @ key.transpose(-1, -2), -1), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("unfused", unfused_attention)


def deepseek_v3(row: Row, sizes: dict[str, Any]) -> nn.Module:
    """Latent attention, three dense layers of the stated inner size, experts of 2,048, one of them shared."""
    sizes = sizes | {"n_routed_experts": row.number("experts"), "num_experts_per_tok": row.number("top_k")}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


def qwen3(row: Row, sizes: dict[str, Any]) -> nn.Module:
    """Heads of 128, whatever the hidden size, with norms of queries and keys."""
    if not row.experts:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=128))
    sizes = sizes | {"num_experts": row.number("experts"), "num_experts_per_tok": row.number("top_k")}
    config = transformers.Qwen3MoeConfig(**sizes, head_dim=128, moe_intermediate_size=row.number("ffn_hidden"))
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(row: Row, sizes: dict[str, Any]) -> nn.Module:
    """Heads of 64, sinks, every second layer with a window of 128."""
    sizes = sizes | {"num_local_experts": row.number("experts"), "num_experts_per_tok": row.number("top_k")}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, head_dim=64))


NAMED_MODELS = dict(zip(NAMED, (deepseek_v3, gpt_oss, qwen3), strict=True))


def model(row: Row) -> nn.Module:
    common: dict[str, Any] = {
        "vocab_size": row.vocabulary,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if row.shape == "plain":
        config: Any = transformers.GPT2Config(
            n_embd=row.number("hidden"),
            n_layer=row.number("layers"),
            n_head=row.number("heads"),
            n_inner=row.number("ffn_hidden"),
            n_positions=row.number("seq_len"),
            activation_function="gelu_pytorch_tanh",  # one kernel, as in Megatron and DeepSpeed
            resid_pdrop=row.dropout,
            embd_pdrop=row.dropout,
            attn_pdrop=0.0 if row.origin.fused_attention else 0.1,  # Megatron-LM's default, a kernel of its own
            attn_implementation="sdpa" if row.origin.fused_attention else "unfused",
            **common,
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "hidden_size": row.number("hidden"),
        "intermediate_size": row.number("ffn_hidden"),
        "num_hidden_layers": row.number("layers"),
        "num_attention_heads": row.number("heads"),
        "num_key_value_heads": row.kv_heads,
        "max_position_embeddings": row.number("seq_len"),
        "tie_word_embeddings": row.shape == "tied",
    }
    named = next((build for name, build in NAMED_MODELS.items() if row.model.startswith(name)), None)
    if named is not None:
        return named(row, sizes | common)
    if row.shape == "ungated":
        return transformers.NemotronForCausalLM(transformers.NemotronConfig(**sizes, **common))
    if row.shape == "experts":
        experts = {"num_local_experts": row.number("experts"), "num_experts_per_tok": row.number("top_k")}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, **common))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common))


def captured_of(row: Row, known: dict[tuple[str, ...], CapturedModel]) -> CapturedModel:
    """The model of a row; the last one is kept, as rows of one model follow each other."""
    names = (
        *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "global_batch"),
        *("experts", "top_k"),
    )
    key = (*(row.cells.get(name, "") for name in names), row.shape, str(row.origin.fused_attention), str(row.dropout))
    if key not in known:
        known.clear()
        with torch.device("meta"):
            tokens = torch.zeros((row.number("global_batch"), row.number("seq_len")), dtype=torch.long)
            built, inputs = model(row), {"input_ids": tokens, "labels": tokens.clone()}
        rewrites = [p for p in normal_form() if row.origin.fused_attention or not isinstance(p, FuseEagerAttention)]
        known[key] = run_passes(capture(built, inputs), rewrites, check=False)
    return known[key]
