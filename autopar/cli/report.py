"""The command ``report``: a page about a plan."""

from __future__ import annotations

from pathlib import Path

import typer

from autopar.cli.check import cluster_of
from autopar.cli.json_output import print_json
from autopar.cli.outputs import check_files, write
from autopar.cli.plan_model import capture_for
from autopar.cli.progress import progress_on_stderr
from autopar.ir.plan import Plan


def run_report(
    plan_file: Path,
    output: Path,
    *,
    model: str | None = None,
    seq: int | None = None,
    cluster_file: Path | None = None,
    json: bool = False,
) -> None:
    """Write the page. Raises AutoparError."""
    plan = Plan.load(plan_file)
    cluster, named = cluster_of(plan, cluster_file), model or plan.model.source
    check_files(output)
    from autopar.report.page import plan_report
    from autopar.report.study import study_plan

    if named is None:
        write(output, lambda path: plan_report(plan, path))
        typer.echo(
            f"{plan_file} does not say where its model is, so the page leaves out what is communicated for each op and "
            "memory over the step\n  try: --model file.py, or --model file.py:name",
            err=True,
        )
    else:
        with progress_on_stderr(quiet=json) as progress:
            captured = capture_for(plan, plan_file, named, seq, progress=progress)
            progress("predicting the plan")
            study = study_plan(captured, cluster, plan)
        write(output, lambda path: plan_report(study, path))
    if json:
        print_json({"report": str(output), "with_model": named is not None})
    else:
        typer.echo(f"report written to {output}")
