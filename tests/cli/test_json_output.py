"""``--json`` prints one object on standard output, whatever the model's file and its libraries print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autopar.search.assign.instance import Instance
from autopar.search.assign.solve import solve_program
from autopar.standard_output import reserved_output

ROOT = Path(__file__).parents[2]
NOISY = """
import ctypes, logging, sys, warnings
import torch
from torch import nn

print("printed on import")
ctypes.CDLL(None).puts(b"printed by C")
warnings.warn("a library's warning")
logging.getLogger("library").warning("a library's log")

def model():
    print("printed by model")
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

def loss_fn(output, target):
    print("printed by the loss")
    return output.square().mean()

def example_inputs(batch_size=8, seq_len=8):
    return (torch.zeros(batch_size, 8),)
"""
ADAPTERS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)

def example_inputs(batch_size=8, seq_len=32):
    tokens = torch.zeros(batch_size or 8, seq_len or 32, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}
"""
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py") if "def example_inputs" in p.read_text())


def search(model: object, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autopar", "search", str(model), "--json", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_what_the_models_file_prints_is_on_standard_error(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    done = search(tmp_path / "noisy.py", "--gpus", "2")
    assert json.loads(done.stdout)["feasible"] is True
    assert "printed on import" in done.stderr and "printed by C" in done.stderr and "printed by model" in done.stderr
    assert "a library's" not in done.stderr


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert solve_program(Instance(costs=(np.array([2.0, 1.0]),), factors=())) == ([1], False)
    assert capfd.readouterr() == ("", "")


def test_standard_output_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_output() as stream:
        print("meanwhile")
        stream.write("the object\n")
    print("afterwards")
    assert capsys.readouterr() == ("the object\nafterwards\n", "meanwhile\n")


@pytest.mark.slow
def test_a_model_with_adapters_is_searched_without_a_word(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    done = search(tmp_path / "adapters.py", "--gpus", "4")
    assert json.loads(done.stdout)["feasible"] is True
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_searched_without_a_word(name: str) -> None:
    gpus = {"llama31_405b": "1024", "deepseek_v3": "512", "llama3_70b": "64"}.get(name, "16")
    done = search(f"examples/{name}.py", "--gpus", gpus)
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""
