"""A model of each of several families under one plan each, against one process; ``make architectures`` is the table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CELLS = [
    ("codegen", "tp2-dp2"),
    ("marian", "pp2-dp2"),
    ("git", "zero3"),
    ("message_passing", "zero3"),
    ("ncf", "free"),
    ("mlp_mixer", "pp2-dp2"),
    ("gat", "tp2-dp2"),
]


def test_architectures_of_several_families() -> None:
    cells = ",".join(f"{model}:{plan}" for model, plan in CELLS)
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "architectures.py"), "--cells", cells]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert f"{len(CELLS)} cells: {len(CELLS)} exact" in result.stdout, result.stdout


def test_every_family_has_models_of_its_own() -> None:
    """The table is about models that the parity table does not have, each once."""
    script = "from architecture_models import FAMILIES; from models import CASES; print(len(CASES), [" + (
        "c.name for f in FAMILIES.values() for c in f])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT / "benchmarks"
    )
    names = re.findall(r"'(\w+)'", result.stdout)
    assert len(names) == len(set(names)) >= 60
    text = (ROOT / "benchmarks" / "models.py").read_text()
    assert not [name for name in names if f'name="{name}"' in text]
