"""Progress of a command, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn


@contextmanager
def progress_on_stderr(*, quiet: bool) -> Iterator[Any]:
    """A spinner on standard error that says what is being done, with a bar once a share is known; silent in pipes."""
    console = Console(stderr=True, quiet=quiet)
    if quiet or not console.is_terminal:
        yield lambda doing, share=None: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20)
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)

        def show(doing: str, share: float | None = None) -> None:
            shown.update(task, description=f"{doing} …", total=None if share is None else 1.0, completed=share or 0.0)

        yield show
