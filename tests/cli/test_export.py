"""``autopar export`` as a user runs it: where it writes, what it says, exit code 2 for mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.export import TARGETS
from tests.export.plans import decoder_plan


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    code = left.value.code
    assert code is None or isinstance(code, int)
    return code or 0


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    decoder_plan(dp=4, zero=3, predicted=True).save(path)
    return str(path)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_printed_and_written(
    target: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autopar(monkeypatch, "export", plan, "--to", target) == 0
    printed = capsys.readouterr()
    assert "note:" in printed.err and "note:" not in printed.out
    assert autopar(monkeypatch, "export", plan, "--to", target, "-o", str(tmp_path / "x")) == 0
    assert (tmp_path / "x").read_text() == printed.out
    assert capsys.readouterr().out == ""
    assert autopar(monkeypatch, "export", plan, "--to", target, "-o", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"target", "name", "path", "notes", "text"}
    assert Path(found["path"]) == tmp_path / found["name"]
    assert (tmp_path / found["name"]).read_text() == printed.out


def test_mistakes_are_answered_once(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autopar(monkeypatch, "export", plan, "--to", "megatrom") == 2
    said = capsys.readouterr().err
    assert "unknown target 'megatrom'" in said and "--to megatron" in said and "torchtitan" in said
    assert autopar(monkeypatch, "export", plan, "--to", "fsdp", "-o", str(tmp_path / "no" / "folder")) == 2
    assert "cannot write" in capsys.readouterr().err
    decoder_plan(dp=2, tp=2).save(tmp_path / "tp.yaml")
    assert autopar(monkeypatch, "export", str(tmp_path / "tp.yaml"), "--to", "fsdp") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "InexpressiblePlan: FSDP cannot say tensor parallelism (tp 2)" in printed.err


def test_help_has_examples_and_every_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert autopar(monkeypatch, "export", "--help") == 0
    printed = capsys.readouterr().out
    assert "autopar export plan.yaml --to deepspeed" in printed
    assert all(target in printed for target in TARGETS)
