"""Every model once, under a plan of every kind, against one process; ``make parity`` runs the whole table."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.patience import run

ROOT = Path(__file__).parents[2]
CELLS = [
    ("gpt2", "tp2 pp2"),
    ("llama", "dp2 tp2"),
    ("llama", "zero3"),
    ("bert", "dp2 pp2"),
    ("t5", "pp4 1f1b"),
    ("t5", "pp2 zb-v"),
    ("bart", "tp2 pp2 zb-v"),
    ("vit", "tp4"),
    ("resnet", "dp4"),
    ("mixtral", "zero2"),
    ("mixtral", "dp2 remat"),
    ("mixtral", "tp2 experts"),
    ("qwen3_moe", "ep2 zero1 pp2"),
    ("deepseek_v3", "ep2 tp2"),
    ("deepseek_v3", "cp2 remat"),
    ("clip", "zero2"),
    ("llama", "dp2 tp2 pp2"),
    ("mlp", "free"),
    ("llama", "dp2 zero3 host"),
    ("mixtral", "pp2 zb-v host"),
    ("t5", "pp4 zb-h1 host"),
]


def test_models_and_plans() -> None:
    cells = [f"{model}:{plan}" for model, plan in CELLS]
    command = (sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "parity.py"), "--cells", ",".join(cells))
    result = run(*command, cwd=ROOT, limit_s=3600)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "cannot be" not in result.stdout, result.stdout
    assert f"{len(CELLS)} of {len(CELLS)} cells" in result.stdout
