"""MODEL of the command line: every form is found, every mistake gets an answer that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.ir.errors import InvalidModelFile
from autopar.load_model import load_model_file

EXAMPLES = Path(__file__).parents[2] / "examples"

GOOD = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 4)

def wide():
    return nn.Linear(4, 400)

def not_a_model():
    return 3

def example_inputs(batch_size=8, seq_len=16):
    return (torch.zeros(batch_size, 4),)
"""


def write(folder: Path, text: str, name: str = "net.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_is_built_on_the_meta_device(tmp_path: Path) -> None:
    found = load_model_file(write(tmp_path, GOOD))
    assert found.name == "net"
    assert next(found.meta_model().parameters()).is_meta
    (x,) = found.meta_inputs(32)
    assert x.is_meta and x.shape == (32, 4)
    assert found.batches is None


def test_a_name_after_the_colon_picks_a_function(tmp_path: Path) -> None:
    found = load_model_file(write(tmp_path, GOOD) + ":wide")
    assert found.name == "wide"
    assert found.meta_model().weight.shape == (400, 4)


def test_the_example_model_has_data_and_learns_from_targets() -> None:
    found = load_model_file(str(EXAMPLES / "gpt.py"))
    assert found.batches is not None
    tokens, targets = next(found.batches(2, 16, 0))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    again, _ = next(found.batches(2, 16, 0))
    assert torch.equal(tokens, again)
    model = found.build()
    assert model(tokens, targets).shape == ()
    assert model(tokens).shape == (2, 16, 256)


@pytest.mark.parametrize(("name", "billions"), [("llama3_8b", 8.03), ("llama3_70b", 70.55)])
def test_llama_examples_have_their_true_size(name: str, billions: float) -> None:
    pytest.importorskip("transformers")
    found = load_model_file(str(EXAMPLES / f"{name}.py"))
    assert sum(p.numel() for p in found.meta_model().parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    assert set(found.meta_inputs(4, 128)) == {"input_ids", "labels"}


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        (GOOD, "{}:narrow", r"has no function narrow\(\).*its functions: model, wide"),
        (GOOD.replace("def model", "def network"), "{}", r"has no function model\(\)"),
        (GOOD.replace("def example_inputs", "def inputs"), "{}", r"has no function example_inputs\("),
        ("import torch\ndef model(:\n", "{}", r"not valid Python: line 2"),
        ("import surely_not_installed", "{}", r"try: pip install surely_not_installed"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, model: str, message: str) -> None:
    with pytest.raises(InvalidModelFile, match=f"(?s){message}"):
        load_model_file(model.format(write(tmp_path, text)))


def test_a_function_that_returns_no_module(tmp_path: Path) -> None:
    found = load_model_file(write(tmp_path, GOOD) + ":not_a_model")
    with pytest.raises(InvalidModelFile, match=r"not_a_model\(\) of .* returned int, expected an nn.Module"):
        found.meta_model()


def test_a_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(InvalidModelFile, match=r"(?s)there is no file .*has: net.py"):
        load_model_file(str(tmp_path / "nett.py"))


def test_something_that_is_no_model_at_all() -> None:
    with pytest.raises(InvalidModelFile, match=r"expected file.py, file.py:name, or hf:"):
        load_model_file("llama")


def test_a_size_that_the_file_does_not_take(tmp_path: Path) -> None:
    found = load_model_file(write(tmp_path, GOOD.replace("batch_size=8, seq_len=16", "batch_size")))
    with pytest.raises(InvalidModelFile, match="pass --global-batch N"):
        found.meta_inputs()
    with pytest.raises(InvalidModelFile, match="--seq has no effect"):
        found.meta_inputs(8, 128)


def test_hugging_face_configs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model_file(f"hf:{tmp_path}")
    assert found.meta_model().config.use_cache is False
    assert found.meta_inputs(4, 32)["labels"].shape == (4, 32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(InvalidModelFile, match="knows no model_type 'nonesuch'"):
        load_model_file(f"hf:{tmp_path}")
    with pytest.raises(InvalidModelFile, match="no Hugging Face config"):
        load_model_file(f"hf:{tmp_path}/elsewhere")
