"""``autopar lengths``, and ``--lengths`` of search and estimate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.cli.main import main
from autopar.ir.lengths import LengthHistogram
from autopar.ir.plan import Plan

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False))

def example_inputs(batch_size=8, seq_len=256):
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens, "position_ids": tokens}
"""


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    LengthHistogram(edges=(8, 64, 400), counts=(90, 10)).save(tmp_path / "lengths.json")
    return tmp_path / "lengths.json"


def test_lengths_are_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.array([17, 4, 0, 9, 0, 8, 2], np.uint16))
    out = tmp_path / "found.json"
    data = ("lengths", str(tmp_path / "a.npy"), "--end-of-document", "0")
    assert autopar(monkeypatch, *data, "-o", str(out)) == 0
    said = capsys.readouterr().out
    assert "3 documents of 7 tokens: 2 in the mean, 2 to 3" in said
    assert LengthHistogram.load(out) == LengthHistogram.of([3, 2, 2])
    assert autopar(monkeypatch, *data, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["percentiles"]["50"]) == (3, 7, 2)
    assert found["mean_by_token"] == pytest.approx(17 / 7)
    assert found["histogram"] == json.loads(out.read_text())


def test_steps_on_packed_documents_are_predicted_and_kept(
    tmp_path: Path, lengths: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = tmp_path / "llama.py", tmp_path / "plan.yaml"
    model.write_text(LLAMA)
    pinned = ("--gpus", "2", "--gpu", "cpu", "--dp", "2", "--num-microbatches", "2", "--lengths", str(lengths))
    assert autopar(monkeypatch, "estimate", str(model), *pinned, "--json", "-o", str(plan)) == 0
    found = json.loads(capsys.readouterr().out)["lengths"]
    assert found["packed"]
    assert found["max_tokens"] == 256
    assert 0.8 * 8 * 256 < found["document_tokens"] <= found["computed_tokens"] <= 8 * 256
    assert found["fast_step_time_s"] <= found["step_time_s"] <= found["slow_step_time_s"]
    kept = Plan.load(plan).prediction
    assert kept is not None
    assert kept.lengths is not None
    assert kept.lengths.model_dump() == found
    assert autopar(monkeypatch, "show", str(plan)) == 0
    assert "documents packed into rows of 256" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_is_refused(
    lengths: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {
        ("--lengths", str(lengths), "--pack"): "nothing keeps them apart",
        ("--pad",): "--pad is about documents",
        ("--lengths", "nowhere.json"): "cannot read lengths nowhere.json",
        ("--lengths", str(lengths), "--seq", "64,128"): "--lengths is about one plan",
    }
    for flags, said in refused.items():
        assert autopar(monkeypatch, "estimate", GPT, "--gpus", "2", *flags) == 2
        assert said in capsys.readouterr().err
