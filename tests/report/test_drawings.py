"""What ``show`` draws in text."""

from __future__ import annotations

import io

from rich.console import Console

from autopar.report.terminal import print_plan
from tests.report.sample import sample_plan


def printed(*, whole: bool, width: int = 150) -> str:
    out = io.StringIO()
    print_plan(sample_plan(), console=Console(file=out, width=width), whole=whole)
    return out.getvalue()


def test_mesh_and_step_are_drawn_in_whole_plans_only() -> None:
    text = printed(whole=True)
    assert "joins ranks" not in printed(whole=False)
    lines = [line.split() for line in text.splitlines()]
    pipeline = next(line for line in lines if line[:2] == ["pp", "4"])
    assert pipeline[2:8] == ["0", "16", "32", "48", "4", "nodes"] and pipeline[-2:] == ["4", "stages"]
    assert " ".join(pipeline[8:-2]).startswith("HDR InfiniBand")
    assert next(line for line in lines if line[:2] == ["tp", "8"] and "…" in line)[2:7] == ["0", "1", "2", "…", "7"]
    rows = [line for line in text.splitlines() if line.startswith("stage ")][1:]
    assert len(rows) == 4
    # 1F1B: the first stage begins at once, each later one when the one before it is through; all fit the screen.
    assert all(len(row) <= 150 for row in rows)
    firsts = [next(n for n, letter in enumerate(row[9:]) if letter != " ") for row in rows]
    assert firsts[0] == 0 and firsts == sorted(firsts) and len(set(firsts)) == 4
    assert "forward" in text and "waiting" in text


def test_many_stages_fit_a_screen() -> None:
    plan = sample_plan()
    stages = [plan.stages[0].model_copy(update={"first": n, "last": n, "remat": {}}) for n in range(18)]
    cluster = plan.cluster.model_copy(update={"num_gpus": 18 * plan.stage_mesh.size})
    many = plan.model_copy(update={"stages": stages, "cluster": cluster, "prediction": None})
    out = io.StringIO()
    print_plan(many, console=Console(file=out, width=150))
    assert "11 more" in out.getvalue() and len(out.getvalue().splitlines()) < 40
    out = io.StringIO()
    print_plan(many, console=Console(file=out, width=150), whole=True)
    assert "more" not in out.getvalue()
