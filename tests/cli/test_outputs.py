"""Files that cannot be written: known before a search begins, and what was found is kept where it was not."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.ir.plan import Plan
from tests.report.sample import sample_plan

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return self.up(x).square().mean()

def model():
    return Net()

def example_inputs(batch_size=8):
    return (torch.zeros(batch_size, 16),)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return str(tmp_path / "net.py")


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("flag", ["-o", "--report", "--trace"])
@pytest.mark.parametrize(
    ("name", "said"), [(".", "is a folder"), ("none/plan.yaml", "there is no folder"), ("x" * 300, "too long")]
)
def test_a_search_does_not_begin_if_a_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flag: str,
    name: str,
    said: str,
) -> None:
    # There is no such model either, which would be said later.
    assert autopar(monkeypatch, "search", "none.py", "--gpus", "2", flag, str(tmp_path / name)) == 2
    assert said in capsys.readouterr().err


def test_other_commands_say_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = str(tmp_path / "plan.yaml")
    sample_plan().save(plan)
    for arguments in (["report", plan, "-o"], ["export", plan, "--to", "slurm", "-o"], ["lengths", plan, "-o"]):
        assert autopar(monkeypatch, *arguments, str(tmp_path / "none" / "file")) == 2
        assert "there is no folder" in capsys.readouterr().err
    assert autopar(monkeypatch, "train", "none.py", plan, "--save", f"{plan}/run") == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("-o",), ("--json", "-o"), ("--no-vary", "--report")])
def test_a_plan_that_cannot_be_written_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    net: str,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert autopar(monkeypatch, "search", net, "--gpus", "2", *flags, "/dev/full") == 2
    printed = capsys.readouterr()
    assert "cannot write /dev/full: No space left on device" in printed.err
    found = re.search(r"the plan that was found is in (\S+)", printed.err)
    assert found is not None
    assert Plan.load(found[1]).num_ranks == 2
    if "--json" in flags:
        assert json.loads(printed.out)["feasible"]


def test_a_plan_is_printed_where_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, net: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert autopar(monkeypatch, "search", net, "--gpus", "2", "-o", "/dev/full") == 2
    printed = capsys.readouterr()
    assert "the plan that was found is printed above" in printed.err
    assert Plan.from_yaml(printed.out[printed.out.index("format: 1") :]).num_ranks == 2


def test_plans_of_several_sizes_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, net: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "batch8.yaml").symlink_to("/dev/full")
    assert autopar(monkeypatch, "search", net, "--gpus", "2", "--global-batch", "4,8", "-o", str(folder)) == 2
    found = re.search(r"the plans that were found are in (\S+)", capsys.readouterr().err)
    assert found is not None
    assert {path.name for path in Path(found[1]).iterdir()} == {"batch4.yaml", "batch8.yaml"}
