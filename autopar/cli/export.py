"""The command ``export``: a plan in the terms of another system, to a file or to standard output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from autopar.cli.check import cluster_of
from autopar.cli.json_output import print_json
from autopar.cli.outputs import check_files, write
from autopar.cli.plan_model import capture_for, model_of
from autopar.cli.progress import progress_on_stderr
from autopar.export import TARGETS, Exported, Options, export
from autopar.ir.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.units import gib, seconds


def run_export(
    plan_file: Path,
    target: str,
    *,
    output: Path | None = None,
    model: str | None = None,
    steps: int = 1000,
    image: str | None = None,
    claim: str | None = None,
    predict: bool = True,
    json: bool = False,
) -> None:
    """Write the export, or print it if there is no ``output``; notes go to standard error. Raises AutoparError.

    predict: whether the step is predicted on the software that the target runs, if that is not the plan's.
    """
    plan = Plan.load(plan_file)
    check_files(None if output is None or output.is_dir() else output)
    options = Options(plan_path=str(plan_file), model=model, steps=steps, image=image, claim=claim)
    exported = export(plan, target, options)
    stack = TARGETS[target].stack
    if predict and stack is not None:
        predicted = _predicted(plan, plan_file, stack, model, quiet=json)
        exported = export(plan, target, replace(options, predicted=predicted))
    path = None if output is None else output / exported.name if output.is_dir() else output
    if path is not None:
        write(path, lambda path: path.write_text(exported.text, encoding="utf-8"))
    if json:
        print_json(_described(exported, path))
        return
    if path is None:
        typer.echo(exported.text, nl=False)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if path is not None:
        console.print(f"wrote {escape(str(path))}")
    for note in exported.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")


def _predicted(plan: Plan, plan_file: Path, stack: str, model: str | None, *, quiet: bool) -> str:
    """A note of what the plan takes on the target's software, or of why that is not known."""
    try:
        named, cluster = model_of(plan, plan_file, model), cluster_of(plan, None, stack=stack)
        from autopar.search.on_stack import predict_on_stack

        with progress_on_stderr(quiet=quiet) as progress:
            captured = capture_for(plan, plan_file, named, None, progress=progress)
            found = predict_on_stack(captured, cluster, plan)
    except AutoparError as error:
        return f"The step is not predicted on {stack}, which runs this: {error}"
    own = ""
    if plan.prediction is not None:
        own = f"; the plan's own prediction, on {plan.cluster.stack}, is {seconds(plan.prediction.step_time_s)}"
    return (
        f"On {stack}, which runs this, a step of this plan is predicted to take {seconds(found.step_time_s)} and "
        f"{gib(found.peak_memory_bytes)} of a GPU{own}. What is lost of the plan is not counted."
    )


def _described(exported: Exported, path: Path | None) -> dict[str, object]:
    return {
        "target": exported.target,
        "name": exported.name,
        "path": None if path is None else str(path),
        "notes": list(exported.notes),
        "text": exported.text,
    }
