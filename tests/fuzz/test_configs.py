"""Hugging Face configs that are nearly right: each is refused with one message, or its model is built."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from autopar.huggingface.config import load_hf_config
from tests.fuzz.harness import Read, failures, none_of
from tests.fuzz.mutation import as_json, changed_value

_DECODER = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", _DECODER),
    "GPT2LMHeadModel": ("gpt2", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "BertForSequenceClassification": ("bert", {**_DECODER, "num_labels": 3}),
    "ViTForImageClassification": ("vit", {**_DECODER, "image_size": 16, "patch_size": 8}),
    "MixtralForCausalLM": ("mixtral", {**_DECODER, "num_local_experts": 2}),
    "Gemma2ForCausalLM": ("gemma2", {**_DECODER, "head_dim": 8}),
    "SwinForImageClassification": (
        "swin",
        {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
    ),
    "ResNetForImageClassification": ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
}  # fmt: skip


@cache
def configs() -> list[dict[str, Any]]:
    """Of small models, half of them with every field that their class has."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL + 1)
    found = []
    for name, (kind, values) in _MODELS.items():
        own = {"model_type": kind, "architectures": [name], **values}
        found += [own, json.loads(transformers.CONFIG_MAPPING[kind](**values).to_json_string(use_diff=False)) | own]
        transformers.CONFIG_MAPPING[kind](**values)
        getattr(transformers, name)
    return found


def read(chance: random.Random, folder: Path) -> None:
    (folder / "config.json").write_bytes(as_json(changed_value(chance.choice(configs()), chance), chance))
    source = load_hf_config(str(folder))
    source.meta_model()
    source.meta_inputs()


KINDS = [("config", read, 1000)]


@pytest.mark.parametrize(("kind", "read", "count"), KINDS)
def test_an_input_is_read_or_refused(kind: str, read: Read, count: int, tmp_path: Path) -> None:
    configs()
    none_of(failures(kind, read, count, tmp_path))
