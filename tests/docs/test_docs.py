"""Every command, program and file in docs/ works as it stands there.

A page is run from top to bottom in a folder of its own, beside ``examples``:

    ```python title="f.py"    written to f.py; so is yaml with a title
    ```python                 run; after what an HTML comment before it says, "<!-- on 8 ranks after: ... -->"
    ```console                each line that begins with "$ " is run. Where the page shows an error below it, the
                              command has to end with exit code 2 and say each of these lines; else with 0
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(
    r"(?:<!-- on (?P<ranks>\d+) ranks after:\n(?P<before>.*?)-->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_ERROR = re.compile(r"^(Usage:|[A-Z]\w+: )")


@dataclass(frozen=True)
class Command:
    """error: what it has to say, if it is to fail."""

    line: str
    error: str = ""


def commands(text: str) -> list[Command]:
    """The commands of a console block, with what is shown below each if that is an error."""
    found = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        while line.endswith("\\"):
            more, _, shown = shown.partition("\n")
            line = line[:-1] + more
        found.append(Command(line, shown.strip() if _ERROR.match(shown) else ""))
    return found


def run(command: str | list[str], folder: Path) -> tuple[int, str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    words = [command] if isinstance(command, str) else command
    done = patience.run(*words, shell=isinstance(command, str), cwd=folder, env=environment)
    return done.returncode, done.stdout, done.stderr


def test_pages_are_found() -> None:
    assert {"index.md", "tutorial.md", "troubleshooting.md"} <= {path.name for path in PAGES}
    assert commands("$ a \\\n  b\nfine\n$ c\nInvalidPlan: no\n  try: d\n") == [
        Command("a   b"),
        Command("c", "InvalidPlan: no\n  try: d"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_what_a_page_shows_works(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    folder = tmp_path / page.stem
    folder.mkdir()
    for number, block in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8"))):
        language, title, text = block["language"], block["title"], block["text"]
        if title:
            (folder / title).write_text(text)
        elif language == "python":
            (folder / f"block{number}.py").write_text((block["before"] or "") + text)
            launcher = ["torchrun", "--nproc-per-node", block["ranks"]] if block["ranks"] else [sys.executable]
            code, out, errors = run([*launcher, f"block{number}.py"], folder)
            assert code == 0, f"{text}\n{out}\n{errors}"
        elif language == "console":
            for command in commands(text):
                code, out, errors = run(command.line, folder)
                assert code == (2 if command.error else 0), f"{command.line}\n{out}\n{errors}"
                for line in command.error.splitlines():
                    assert " ".join(line.split()) in " ".join(errors.split()), f"{command.line}\n{errors}"
                assert not command.error or "Traceback" not in errors
