"""The command ``export``: a plan in the terms of another system, to a file or to standard output."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from autopar.cli.json_output import print_json
from autopar.export import Exported, Options, export
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan


def run_export(
    plan_file: Path,
    target: str,
    *,
    output: Path | None = None,
    model: str | None = None,
    steps: int = 1000,
    image: str | None = None,
    json: bool = False,
) -> None:
    """Write the export, or print it if there is no ``output``; notes go to standard error. Raises AutoparError."""
    options = Options(plan_path=str(plan_file), model=model, steps=steps, image=image)
    exported = export(Plan.load(plan_file), target, options)
    path = None if output is None else output / exported.name if output.is_dir() else output
    if path is not None:
        try:
            path.write_text(exported.text, encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
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


def _described(exported: Exported, path: Path | None) -> dict[str, object]:
    return {
        "target": exported.target,
        "name": exported.name,
        "path": None if path is None else str(path),
        "notes": list(exported.notes),
        "text": exported.text,
    }
