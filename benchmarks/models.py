"""Small instances of unmodified models, with a batch of data each, for parity checks.

Every entry builds the real architecture from a config, with dropout 0, and random but fixed data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    learning_rate: of SGD; small enough that a single process in float32 stays near one in float64.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    learning_rate: float = 0.1


def random_tokens(step: int, *, rows: int = BATCH, columns: int = SEQ, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocab, (rows, columns), generator=generator)


def language_batch(step: int) -> dict[str, Any]:
    tokens = random_tokens(step)
    return {"input_ids": tokens, "labels": tokens.clone()}


def random_images(step: int, size: int = 32) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(2000 + step))


def random_classes(step: int, count: int = 8) -> Tensor:
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


def mixtral(*, auxiliary_loss: bool = False) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
            use_cache=False, output_router_logits=auxiliary_loss, router_aux_loss_coef=0.1,
        )
    )  # fmt: skip


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=3,
            norm_topk_prob=True, max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


def olmoe() -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_experts=8, num_experts_per_tok=2, max_position_embeddings=32, use_cache=False, eos_token_id=1,
        )
    )  # fmt: skip


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=4, topk_group=2,
            num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=32, use_cache=False,
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


def vit(image_size: int = 32) -> nn.Module:
    """Over (image_size / 8)^2 patches and a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
            image_size=image_size, patch_size=8, num_labels=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=8,
        )
    )  # fmt: skip


# Sizes that most decoders share.
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32, use_cache=False, hidden_dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**DECODER, head_dim=8))


def gemma2() -> nn.Module:
    """Score and logit caps, sliding windows in every second layer, norms around each part."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**DECODER, head_dim=8, sliding_window=4, query_pre_attn_scalar=8))


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**DECODER, sliding_window=4))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**DECODER, tie_word_embeddings=True))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=8))


def olmo2() -> nn.Module:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**DECODER))


def phi3() -> nn.Module:
    """Fused query-key-value and fused gate-up projections."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(
        Phi3Config(**DECODER, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    )


def falcon() -> nn.Module:
    """Parallel attention and MLP, one key/value head for all queries."""
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, multi_query=True,
            parallel_attn=True, use_cache=False, max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=64,
            word_embed_proj_dim=32, max_position_embeddings=32, use_cache=False, dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


def bloom() -> nn.Module:
    """Attention biased by distance (ALiBi)."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCAB, hidden_size=32, n_layer=4, n_head=4, use_cache=False, hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )  # fmt: skip


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    return DistilBertForMaskedLM(
        DistilBertConfig(
            vocab_size=VOCAB, dim=32, n_layers=4, n_heads=4, hidden_dim=64, max_position_embeddings=32, dropout=0.0,
            attention_dropout=0.0,
        )
    )  # fmt: skip


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
            use_cache=False, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
            max_source_positions=SEQ, max_target_positions=32, use_cache=False, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
        )
    )  # fmt: skip


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32, "projection_dim": 16, "eos_token_id": VOCAB - 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8, "projection_dim": 16,
    }  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(
            hidden_sizes=[8, 16, 32], depths=[1, 2, 1], num_stages=3, num_labels=8, patch_size=4, image_size=32,
            drop_path_rate=0.0, out_features=["stage3"],
        )
    )  # fmt: skip


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=8,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
        )
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)
    )


def masked_batch(step: int) -> dict[str, Any]:
    tokens = random_tokens(step)
    labels = tokens.clone()
    labels[:, ::3] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def translation_batch(step: int) -> dict[str, Any]:
    return {"input_ids": random_tokens(step, columns=2 * SEQ), "labels": random_tokens(step + 500)}


def image_batch(step: int, size: int = 32) -> dict[str, Any]:
    return {"pixel_values": random_images(step, size), "labels": random_classes(step)}


def _whisper_batch(step: int) -> dict[str, Any]:
    features = torch.randn(BATCH, 16, 2 * SEQ, generator=torch.Generator().manual_seed(5000 + step))
    return {"input_features": features, "labels": random_tokens(step)}


def _clip_batch(step: int) -> dict[str, Any]:
    tokens = random_tokens(step)
    tokens[:, -1] = VOCAB - 1  # the end of the text, whose state stands for all of it
    return {"input_ids": tokens, "pixel_values": random_images(step), "return_loss": True}


def _mlp_batch(step: int) -> dict[str, Any]:
    x = torch.randn(BATCH, 24, generator=torch.Generator().manual_seed(4000 + step))
    return {"input": x, "target": random_classes(step)}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="gpt2", build=gpt2, batch=language_batch),
        Case(name="llama", build=llama, batch=language_batch),
        Case(name="bert", build=bert, batch=masked_batch),
        Case(name="t5", build=t5, batch=translation_batch),
        Case(name="vit", build=vit, batch=image_batch),
        # 26 positions, which two ranks of a ring divide.
        Case(name="vit_40", build=partial(vit, image_size=40), batch=partial(image_batch, size=40)),
        Case(name="resnet", build=resnet, batch=image_batch),
        Case(name="mixtral", build=mixtral, batch=language_batch),
        Case(name="mixtral_aux", build=partial(mixtral, auxiliary_loss=True), batch=language_batch),
        Case(name="qwen3_moe", build=qwen3_moe, batch=language_batch),
        Case(name="olmoe", build=olmoe, batch=language_batch),
        Case(name="deepseek_v3", build=deepseek_v3, batch=language_batch),
        Case(name="gpt_neox", build=gpt_neox, batch=language_batch),
        Case(name="gemma", build=gemma, batch=language_batch),
        Case(name="gemma2", build=gemma2, batch=language_batch),
        Case(name="mistral", build=mistral, batch=language_batch),
        Case(name="qwen2", build=qwen2, batch=language_batch),
        Case(name="qwen3", build=qwen3, batch=language_batch),
        Case(name="olmo2", build=olmo2, batch=language_batch),
        Case(name="phi3", build=phi3, batch=language_batch),
        Case(name="falcon", build=falcon, batch=language_batch),
        Case(name="opt", build=opt, batch=language_batch),
        Case(name="bloom", build=bloom, batch=language_batch),
        Case(name="distilbert", build=distilbert, batch=masked_batch),
        Case(name="bart", build=bart, batch=translation_batch),
        Case(name="whisper", build=whisper, batch=_whisper_batch),
        Case(name="clip", build=clip, batch=_clip_batch, learning_rate=0.01),
        Case(name="convnext", build=convnext, batch=image_batch),
        Case(name="swin", build=swin, batch=image_batch),
        Case(name="mlp", build=mlp, batch=_mlp_batch, loss_fn=nn.functional.cross_entropy),
    )
}


def build(case: Case) -> nn.Module:
    """The model of ``case`` in train mode, the same numbers on every call and every rank."""
    torch.manual_seed(0)
    return case.build().train()
