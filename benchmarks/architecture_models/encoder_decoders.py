"""Encoders with decoders that attend to them."""

from __future__ import annotations

from typing import Any

from models import VOCAB, translation_batch

from .building import hugging_face

_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "use_cache": False, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

ENCODER_DECODERS = (
    hugging_face("pegasus", "PegasusForConditionalGeneration", translation_batch, **_BART),
    hugging_face("marian", "MarianMTModel", translation_batch, **_BART),
    hugging_face("m2m_100", "M2M100ForConditionalGeneration", translation_batch, **_BART, encoder_layerdrop=0.0,
                 decoder_layerdrop=0.0),
    hugging_face("mvp", "MvpForConditionalGeneration", translation_batch, **_BART),
    hugging_face("blenderbot", "BlenderbotForConditionalGeneration", translation_batch, **_BART),
    # Windows of the sequence, cut out with strides.
    hugging_face("led", "LEDForConditionalGeneration", translation_batch,
                 **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
                 attention_window=[8, 8], max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    hugging_face("umt5", "UMT5ForConditionalGeneration", translation_batch, **_T5, feed_forward_proj="gated-gelu"),
    # Encoders that attend to blocks beside their own.
    hugging_face("longt5", "LongT5ForConditionalGeneration", translation_batch, **_T5, local_radius=7,
                 encoder_attention_type="local"),
    # Decoders that predict two tokens ahead, by streams of their own.
    hugging_face(
        "prophetnet", "ProphetNetForConditionalGeneration", translation_batch, vocab_size=VOCAB, hidden_size=32,
        encoder_ffn_dim=64, num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=64,
        num_decoder_layers=2, num_decoder_attention_heads=4, ngram=2, max_position_embeddings=64, use_cache=False,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, decoder_start_token_id=2,
        num_buckets=8, relative_max_distance=16, disable_ngram_loss=False,
    ),
)  # fmt: skip
