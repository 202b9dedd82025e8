"""Encoders of text, and of what is laid out as text."""

from __future__ import annotations

from typing import Any

import torch
from models import BATCH, SEQ, VOCAB, masked_batch

from .building import NO_DROPOUT, hugging_face

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0, **NO_DROPOUT,
}  # fmt: skip


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _ENCODER.items() if name not in names}


def _boxes(step: int) -> dict[str, Any]:
    """Words at places on a page: corners of rectangles, between 0 and 31."""
    corners = torch.randint(0, 16, (BATCH, SEQ, 2), generator=torch.Generator().manual_seed(6000 + step))
    return {**masked_batch(step), "bbox": torch.cat([corners, corners + 15], dim=-1)}


def _classified(step: int) -> dict[str, Any]:
    batch = masked_batch(step)
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"][:, 0] % 8}


def _unmasked(step: int) -> dict[str, Any]:
    return {name: value for name, value in masked_batch(step).items() if name != "attention_mask"}


ENCODERS = (
    hugging_face("electra", "ElectraForMaskedLM", masked_batch, **_ENCODER, embedding_size=16),
    # One layer's weights for all layers, embeddings of fewer features.
    hugging_face("albert", "AlbertForMaskedLM", masked_batch, **_ENCODER, embedding_size=16),
    hugging_face("roformer", "RoFormerForMaskedLM", masked_batch, **_ENCODER, embedding_size=32),
    # Bottlenecks around each layer and four feed-forward networks in it.
    hugging_face(
        "mobilebert", "MobileBertForMaskedLM", masked_batch, **_ENCODER, embedding_size=32, intra_bottleneck_size=16,
        true_hidden_size=16, num_feedforward_networks=2, normalization_type="layer_norm",
    ),
    hugging_face("layoutlm", "LayoutLMForMaskedLM", _boxes, **_ENCODER, max_2d_position_embeddings=32),
    # Proteins: rotary positions, scaled embeddings of masked tokens.
    hugging_face("esm", "EsmForMaskedLM", masked_batch, **_ENCODER, position_embedding_type="rotary", mask_token_id=3,
                 token_dropout=False),
    # Local and global attention, gated linear units, no biases.
    hugging_face(
        "modernbert", "ModernBertForMaskedLM", masked_batch,
        **_without("hidden_dropout_prob", "attention_probs_dropout_prob"), global_attn_every_n_layers=2,
        local_attention=8, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    # Relative positions in attention, two scores added up, shifted by a view.
    hugging_face("xlnet", "XLNetForSequenceClassification", _classified, vocab_size=VOCAB, d_model=32,
                 n_layer=2, n_head=4, d_inner=64, dropout=0.0, summary_last_dropout=0.0, num_labels=8),
    # Content and position attend to each other.
    hugging_face(
        "deberta_v2", "DebertaV2ForMaskedLM", masked_batch, **_ENCODER, relative_attention=True,
        pos_att_type=["p2c", "c2p"], max_relative_positions=16, position_buckets=8, norm_rel_ebd="layer_norm",
        share_att_key=True, legacy=True,
    ),
    # Fourier transforms in place of attention.
    hugging_face("fnet", "FNetForMaskedLM", _unmasked,
                 **_without("attention_probs_dropout_prob", "num_attention_heads")),
    # Linear layers as grouped convolutions over the sequence.
    hugging_face("squeezebert", "SqueezeBertForMaskedLM", masked_batch, **_ENCODER, embedding_size=32, q_groups=2,
                 k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2),
    # Attention beside convolutions whose kernels are made of the words.
    hugging_face("convbert", "ConvBertForMaskedLM", masked_batch, **_ENCODER, embedding_size=32, conv_kernel_size=3),
)  # fmt: skip
