"""Models of sound, as waves or as spectrograms."""

from __future__ import annotations

from typing import Any

import torch
from models import BATCH, SEQ, VOCAB, random_classes, random_tokens

from .building import NO_DROPOUT, hugging_face

_WAVE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "layerdrop": 0.0,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "feat_extract_dropout": 0.0, "num_labels": 8, "classifier_proj_size": 16,
}  # fmt: skip


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _waves(step: int) -> dict[str, Any]:
    return {"input_values": _normal(BATCH, 640, seed=7000 + step), "labels": random_classes(step)}


def _speech(step: int) -> dict[str, Any]:
    return {"input_features": _normal(BATCH, 4 * SEQ, 16, seed=7100 + step), "labels": random_tokens(step)}


def _spectrograms(step: int) -> dict[str, Any]:
    return {"input_values": _normal(BATCH, 32, 16, seed=7200 + step), "labels": random_classes(step)}


AUDIO = (
    # Strided convolutions of the wave; positions by a convolution whose weight is a norm and a direction.
    hugging_face("wav2vec2", "Wav2Vec2ForSequenceClassification", _waves, **_WAVE),
    hugging_face("hubert", "HubertForSequenceClassification", _waves, **_WAVE),
    # Relative positions gated by the queries.
    hugging_face("wavlm", "WavLMForSequenceClassification", _waves, **_WAVE, num_buckets=8, max_bucket_distance=16),
    # Half the frames inside, as many again outside.
    hugging_face("sew", "SEWForSequenceClassification", _waves, **_WAVE, squeeze_factor=2),
    hugging_face(
        "speech_to_text", "Speech2TextForConditionalGeneration", _speech, vocab_size=VOCAB, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, input_feat_per_channel=16, conv_channels=32, num_conv_layers=2, max_source_positions=64,
        max_target_positions=32, use_cache=False, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2,
    ),
    # Patches of a spectrogram.
    hugging_face(
        "ast", "ASTForAudioClassification", _spectrograms, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, patch_size=8, frequency_stride=8, time_stride=8, max_length=32, num_mel_bins=16,
        num_labels=8, **NO_DROPOUT,
    ),
)  # fmt: skip
