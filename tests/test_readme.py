"""The commands in the README's table of strategies plan what they say."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from autopar.cli.main import main

ROOT = Path(__file__).parents[1]


def _commands() -> list[list[str]]:
    text = (ROOT / "README.md").read_text().partition("## Strategies")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "`" in line]
    found = []
    for row in rows:
        command = re.search(r"`([^`]*)`", row[1])
        assert command is not None, row
        words = shlex.split(command.group(1))
        if words[0] == "...":
            words = [*found[-1][: found[-1].index(words[1])], *words[1:]]
        found.append(words)
    return [words[1:] for words in found]


COMMANDS = _commands()


def test_the_table_is_found() -> None:
    assert len(COMMANDS) >= 18


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [w for word in words for w in (["examples/gpt.py", "--gpus", "8"] if word == "gpt" else [word])]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments, "--json"])
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, capsys.readouterr()
    assert '"feasible": true' in capsys.readouterr().out
