"""What a command is doing, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console


@contextmanager
def progress_on_stderr(*, quiet: bool) -> Iterator[Any]:
    """A spinner on standard error that says what is being done; silent in pipes."""
    console = Console(stderr=True, quiet=quiet)
    if quiet or not console.is_terminal:
        yield lambda doing: None
        return
    with console.status("starting") as status:
        yield lambda doing: status.update(f"{doing} …")
