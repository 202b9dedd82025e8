"""Command lines with wrong values: one message and exit code 2, or what the command does."""

from __future__ import annotations

import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer

from autopar.cli.app import app, run
from autopar.export import TARGETS
from tests.fuzz.harness import Read, failures, none_of
from tests.report.sample import sample_plan

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def model():
    return Net()

def example_inputs(batch_size=8, seq_len=4):
    return (torch.zeros(batch_size, seq_len, 16),)
"""
# Words for any option or argument: values that some of them take, and values that none does.
WORDS = (
    "", " ", "-", "--", "-1", "0", "1", "2", "3", "8", "64", "65536", "99999999999999999999", "1e3", "0.5", "1.5",
    "nan", "inf", "-inf", "1:8", "8:1", "1,2", "1,1", "1:99999999999999999999", "9" * 5000, "1," * 500, ":", ",", "a:b",
    "*: tp=0", "*.weight: tp=9", "*: bf16", "x" * 5000, "[bold", "\x1b", "é", "\udce9", "on", "off", "full", "1f1b",
    "zb-v", "bf16", "fp8-row", "bf16,fp8-row", "h100-sxm", "cpu", "megatron-core-2025", "none", "stdlib", "/dev/null",
    "/dev/full", "/dev/zero", "/", ".", "..", "/proc/self/mem", "no/such/folder/file", "x\0y", "a" * 300, "plan.yaml",
    "net.py", "net.py:none", "broken.yaml", "tokens.npy", "folder", "hf:folder", "cluster.yaml", "loads.json", "hf:",
    "net.py:Net", "mlp.up/linear: tp=n", "q: dp=b",
)  # fmt: skip
# Commands whose ranks start processes or measure for minutes get a model or an output that there is not.
_HEAVY = {"train": ["no.py", "plan.yaml"], "profile": ["-o", "no/such/folder/file"]}
_LEADING: dict[str, tuple[list[str], ...]] = {
    "search": (["no.py", "--gpus", "4"], ["no.py"], ["hf:folder", "--gpus", "2"]),
    "estimate": (["no.py", "--gpus", "4"], ["no.py", "--cluster", "cluster.yaml"]),
    "show": (["plan.yaml"], []),
    "report": (["plan.yaml", "-o", "no/such/folder/file"], []),
    "explain": (["plan.yaml"], []),
    "compare": (["plan.yaml", "plan.yaml"], ["plan.yaml"]),
    "check": (["no.py", "plan.yaml"], []),
    "partition": (["no.py", "plan.yaml"], []),
    "export": (*(["plan.yaml", "--to", target] for target in TARGETS), []),
    "lengths": (["tokens.npy"], []),
    "train": (_HEAVY["train"],),
    "profile": (_HEAVY["profile"],),
}


@cache
def commands() -> dict[str, list[click.Option]]:
    """The options of every command."""
    typer.main.get_command = cache(typer.main.get_command)  # which builds all of them again for every command line
    group: Any = typer.main.get_command(app)
    found = {name: command.params for name, command in group.commands.items()}
    return {name: [one for one in params if one.param_type_name == "option"] for name, params in found.items()}


@cache
def _plan() -> str:
    return sample_plan().to_yaml()


def _files(folder: Path) -> None:
    if not (folder / "net.py").exists():
        (folder / "net.py").write_text(NET)
        (folder / "broken.yaml").write_text("a: [")
        (folder / "loads.json").write_text('{"layers.0": [1, 2]}')
        (folder / "cluster.yaml").write_text("{gpu: h100-sxm, num_gpus: 4}")
        (folder / "folder").mkdir()
        np.save(folder / "tokens.npy", np.arange(100))
    (folder / "plan.yaml").write_text(_plan())


def arguments(chance: random.Random) -> list[str]:
    """A command with zero to four options, values among ``WORDS``."""
    command = chance.choice(sorted(commands()))
    given = [command, *chance.choice(_LEADING[command])]
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        option = chance.choice(commands()[command])
        if command == "profile" and option.name == "output":
            continue
        given.append(chance.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag:
            given.append(chance.choice(WORDS))
    if chance.random() < 0.2 and command not in _HEAVY:
        given.insert(chance.randrange(1, len(given) + 1), chance.choice(WORDS))
    if chance.random() < 0.1 and command not in _HEAVY:
        given.pop()
    return given


def read(chance: random.Random, folder: Path) -> None:
    os.chdir(folder)
    _files(folder)
    _run(arguments(chance))


def read_searches(chance: random.Random, folder: Path) -> None:
    os.chdir(folder)
    _files(folder)
    given = [chance.choice(("search", "estimate")), "net.py", "--gpus", chance.choice(("1", "4", "8"))]
    for _ in range(chance.choice((1, 2, 3))):
        option = chance.choice(commands()["search"])
        given.append(chance.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag:
            given.append(chance.choice(WORDS))
    _run([*given, "--no-vary"])


def _run(given: list[str]) -> None:
    """The command line, which ends with exit code 0, 1 where a check says no, or 2."""
    sys.argv = ["autopar", *given]
    try:
        run()
    except SystemExit as ended:
        said_no = ended.code == 1 and given[0] == "check"
        assert ended.code in (None, 0, 2) or said_no, f"exit code {ended.code} of {given}"
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__} of {given}") from error


KINDS = [("command line", read, 500), ("search", read_searches, 20)]


@pytest.mark.parametrize(("kind", "read", "count"), KINDS)
def test_an_input_is_read_or_refused(kind: str, read: Read, count: int, tmp_path: Path) -> None:
    commands()
    none_of(failures(kind, read, count, tmp_path))
