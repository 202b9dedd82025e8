"""Small instances of unmodified models, with a batch of data each, for parity checks.

Every entry builds the real architecture from a config, with dropout 0, and random but fixed data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

BATCH = 8
SEQ = 16
VOCAB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model under test.

    build: makes the model, seeded. batch: inputs of one global batch for a step number, by keyword.
    loss_fn: applied to (output, target) when the model returns no loss itself.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None


def _tokens(step: int, *, rows: int = BATCH, columns: int = SEQ, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocab, (rows, columns), generator=generator)


def _language(step: int) -> dict[str, Any]:
    tokens = _tokens(step)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(step: int) -> Tensor:
    return torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(2000 + step))


def _classes(step: int, count: int = 8) -> Tensor:
    return torch.randint(0, count, (BATCH,), generator=torch.Generator().manual_seed(3000 + step))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=4, n_head=4, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
            use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32,
            patch_size=8, num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=8,
        )
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)
    )


def _bert_batch(step: int) -> dict[str, Any]:
    tokens = _tokens(step)
    labels = tokens.clone()
    labels[:, ::3] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _t5_batch(step: int) -> dict[str, Any]:
    return {"input_ids": _tokens(step, columns=2 * SEQ), "labels": _tokens(step + 500)}


def _vit_batch(step: int) -> dict[str, Any]:
    return {"pixel_values": _images(step), "labels": _classes(step)}


def _mlp_batch(step: int) -> dict[str, Any]:
    x = torch.randn(BATCH, 24, generator=torch.Generator().manual_seed(4000 + step))
    return {"input": x, "target": _classes(step)}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="gpt2", build=gpt2, batch=_language),
        Case(name="llama", build=llama, batch=_language),
        Case(name="bert", build=bert, batch=_bert_batch),
        Case(name="t5", build=t5, batch=_t5_batch),
        Case(name="vit", build=vit, batch=_vit_batch),
        Case(name="resnet", build=resnet, batch=_vit_batch),
        Case(name="mixtral", build=mixtral, batch=_language),
        Case(name="mlp", build=mlp, batch=_mlp_batch, loss_fn=nn.functional.cross_entropy),
    )
}


def build(case: Case) -> nn.Module:
    """The model of ``case`` in train mode, the same numbers on every call and every rank."""
    torch.manual_seed(0)
    return case.build().train()
