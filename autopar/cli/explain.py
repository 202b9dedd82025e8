"""The command ``explain``: what a plan communicates, and why an op is placed as it is."""

from __future__ import annotations

from pathlib import Path

from autopar.cli.check import cluster_of
from autopar.cli.json_output import print_json
from autopar.cli.plan_model import capture_for, model_of
from autopar.cli.progress import progress_on_stderr
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan


def run_explain(
    plan_file: Path,
    op: str | None,
    *,
    model: str | None = None,
    seq: int | None = None,
    cluster_file: Path | None = None,
    json: bool = False,
) -> None:
    """Print an explanation. Raises AutoparError."""
    plan = Plan.load(plan_file)
    named = model_of(plan, plan_file, model)
    cluster, length = cluster_of(plan, cluster_file), seq or plan.model.seq
    from autopar.report.explanation import described, overview, print_explanation, print_overview
    from autopar.search.explanation import explain_op

    with progress_on_stderr(quiet=json) as progress:
        captured = capture_for(plan, plan_file, named, seq, progress=progress)
        if op is None:
            found = overview(captured, cluster, plan)
        else:
            explained = explain_op(captured, cluster, plan, op, progress=progress)
    if op is None:
        if json:
            print_json(found)
        else:
            print_overview(found)
    elif json:
        print_json(described(explained))
    else:
        like = ["autopar", "search", named, "--like", str(plan_file), "--global-batch", str(plan.batch.global_size)]
        like += [] if length is None else ["--seq", str(length)]
        like += [] if cluster_file is None else ["--cluster", str(cluster_file)]
        print_explanation(explained, like)


def run_critical_path(
    plan_file: Path,
    op: str | None,
    *,
    model: str | None = None,
    seq: int | None = None,
    cluster_file: Path | None = None,
    json: bool = False,
) -> None:
    """Print what the step of a plan waits for. Raises AutoparError."""
    if op is not None:
        raise InvalidInput(f"--critical-path is of the whole step, not of the op {op!r}\n  try: one of both")
    plan = Plan.load(plan_file)
    named, cluster = model_of(plan, plan_file, model), cluster_of(plan, cluster_file)
    from autopar.report.critical_path import critical_path_data, print_critical_path

    with progress_on_stderr(quiet=json) as progress:
        captured = capture_for(plan, plan_file, named, seq, progress=progress)
        found = critical_path_data(captured, cluster, plan)
    if json:
        print_json(found)
    else:
        print_critical_path(found)
