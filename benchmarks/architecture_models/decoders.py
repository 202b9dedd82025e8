"""Decoders: language models that read to the left."""

from __future__ import annotations

from models import VOCAB

from .building import SMALL, hugging_face

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT = {
    "vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False,
    "bos_token_id": 1, "eos_token_id": 2, **_NO_DROPOUT,
}  # fmt: skip

DECODERS = (
    # One key/value head for all query heads, in one projection with the queries.
    hugging_face("gpt_bigcode", "GPTBigCodeForCausalLM", **_GPT, multi_query=True),
    # A query-key-value projection laid out for four tensor-parallel ranks; rotary halves interleaved.
    hugging_face("codegen", "CodeGenForCausalLM", **_GPT, rotary_dim=4),
    hugging_face("gptj", "GPTJForCausalLM", **_GPT, rotary_dim=4),
    # Every second layer attends to a window.
    hugging_face(
        "gpt_neo", "GPTNeoForCausalLM", vocab_size=VOCAB, max_position_embeddings=32, hidden_size=32, num_layers=2,
        num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4, use_cache=False, resid_dropout=0.0,
        embed_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
    ),
    # Attention biased by distance, no biases elsewhere.
    hugging_face(
        "mpt", "MptForCausalLM", vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2,
        max_seq_len=32, use_cache=False, resid_pdrop=0.0, emb_pdrop=0.0,
    ),
    # Rotary embedding of a quarter of each head.
    hugging_face("stablelm", "StableLmForCausalLM", **SMALL, partial_rotary_factor=0.25),
    hugging_face("starcoder2", "Starcoder2ForCausalLM", **SMALL, sliding_window=8),
    # Attention and MLP in parallel, logits scaled.
    hugging_face("cohere", "CohereForCausalLM", **SMALL, use_qk_norm=True),
    # Four norms a layer, fused gate and up projection.
    hugging_face("glm4", "Glm4ForCausalLM", **SMALL, head_dim=8),
    # Multipliers of embeddings, residuals and attention.
    hugging_face("granite", "GraniteForCausalLM", **SMALL, embedding_multiplier=2.0, residual_multiplier=0.5),
    # Norms with weight 1 + w, squared ReLU.
    hugging_face("nemotron", "NemotronForCausalLM", **SMALL),
    # Norms of queries and keys inside the heads of a fused projection.
    hugging_face(
        "persimmon", "PersimmonForCausalLM",
        **{key: value for key, value in SMALL.items() if key != "num_key_value_heads"}, hidden_dropout=0.0,
    ),
    hugging_face(
        "biogpt", "BioGptForCausalLM", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, use_cache=False, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, layerdrop=0.0, activation_dropout=0.0, pad_token_id=0,
    ),
    hugging_face(
        "xglm", "XGLMForCausalLM", vocab_size=VOCAB, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64,
        max_position_embeddings=32, use_cache=False, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        layerdrop=0.0, pad_token_id=0,
    ),
)  # fmt: skip
