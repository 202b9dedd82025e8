"""Checkpoints of transformers by the names of the model, read in slices, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from autopar.huggingface.keys import file_tensors, model_tensors
from autopar.huggingface.pretrained import format_of, open_pretrained
from autopar.ir.errors import CheckpointError, InvalidModelFile
from autopar.runtime.checkpoint.safetensors_files import SINGLE
from autopar.runtime.lazy_tensor import LazyTensor, as_lazy

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}),
    "llama tied": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4},
    ),
    "bert": ("BertForMaskedLM", {**SMALL, "max_position_embeddings": 32}),
}


def _model(name: str) -> Any:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return model_class(model_class.config_class(**settings, **ids))


def _on_meta(name: str) -> Any:
    with torch.device("meta"):
        return _model(name)


def _corner(value: Tensor) -> Tensor:
    for dim, size in enumerate(value.shape):
        value = value.narrow(dim, size // 4, size // 2)
    return value


@pytest.mark.parametrize("name", MODELS)
def test_names_of_files_and_of_the_model(name: str, tmp_path: Path) -> None:
    model = _model(name)
    model.save_pretrained(tmp_path)
    opened = open_pretrained(str(tmp_path), torch.float32)
    assert all(value.is_meta for value in opened.model.parameters())
    assert opened.files.bytes_read == 0
    state = model.state_dict()
    for key, value in opened.values.items():
        before = opened.files.bytes_read
        part = _corner(value)
        assert isinstance(part, LazyTensor)
        read = part.read()
        assert torch.equal(read, _corner(state[key])), key
        # Stacked experts and all else are read in slices.
        assert opened.files.bytes_read - before == 4 * read.numel(), key
    tied = model.all_tied_weights_keys
    assert set(opened.values) | set(tied) >= set(state)
    # And back.
    unique = {id(value): as_lazy(value.detach()) for value in model.state_dict(keep_vars=True).values()}
    lazy = {key: unique[id(value)] for key, value in model.state_dict(keep_vars=True).items()}
    form = format_of(model)
    assert form is not None
    written = {key: value.read() for key, value in form.file_tensors(lazy).items()}  # type: ignore[attr-defined]
    torch.testing.assert_close(written, load_file(tmp_path / SINGLE), rtol=0, atol=0)


def test_a_base_model_prefix_is_added_and_taken_away(tmp_path: Path) -> None:
    model = _model("gpt2")
    weights = {key: value.clone() for key, value in model.transformer.state_dict().items()}
    found = model_tensors(_on_meta("gpt2"), {key: as_lazy(value) for key, value in weights.items()}, "here")
    assert torch.equal(found["transformer.wte.weight"].read(), weights["wte.weight"])  # type: ignore[attr-defined]
    base = _on_meta("gpt2").transformer
    found = model_tensors(base, {f"transformer.{key}": as_lazy(value) for key, value in weights.items()}, "here")
    assert set(found) == set(base.state_dict())


def test_what_does_not_fit_is_listed() -> None:
    model = _model("llama")
    weights = {key: as_lazy(value) for key, value in model.state_dict().items()}
    del weights["model.norm.weight"]
    weights["model.extra.weight"] = as_lazy(torch.zeros(3))
    weights["lm_head.weight"] = as_lazy(torch.zeros(3, 5))
    with pytest.raises(CheckpointError) as caught:
        model_tensors(_on_meta("llama"), weights, "folder")
    for words in (
        "folder does not fit LlamaForCausalLM",
        "model.norm.weight is missing",
        "model.extra.weight is not in the model",
        "lm_head.weight has shape (3, 5), expected (32, 16)",
    ):
        assert words in str(caught.value)


def test_a_failing_conversion_is_named() -> None:
    model = _on_meta("mixtral")
    model_files = file_tensors(model, {key: as_lazy(value) for key, value in _model("mixtral").state_dict().items()})
    files = {key: as_lazy(value) for key, value in model_files.items()}
    gate = next(key for key in files if key.endswith("experts.1.w1.weight"))
    files[gate] = as_lazy(torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match="cannot make"):
        model_tensors(model, files, "folder")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match="there is no Hugging Face config"):
        open_pretrained(str(tmp_path), torch.float32)
    _model("gpt2").config.save_pretrained(tmp_path)
    with pytest.raises(InvalidModelFile, match="names no class"):
        open_pretrained(str(tmp_path), torch.float32)
    model = _model("gpt2")
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no weights that can be read in slices"):
        open_pretrained(str(tmp_path), torch.float32)
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="does not fit"):
        open_pretrained(str(tmp_path), torch.float32)


def test_only_models_of_transformers_have_a_form() -> None:
    assert format_of(torch.nn.Linear(2, 2)) is None
