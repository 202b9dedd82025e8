"""``--json``: one JSON object on standard output, and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

import typer

_REAL: ContextVar[TextIO | None] = ContextVar("standard output of a command that prints JSON", default=None)


def reserve(context: typer.Context, wanted: bool) -> bool:
    """Callback of the flag: until the command ends, whatever prints does so on standard error, but ``print_json``."""
    if wanted:
        context.with_resource(_reserved())
    return wanted


@contextmanager
def _reserved() -> Iterator[None]:
    from autopar.standard_output import reserved_output

    with reserved_output() as stream:
        token = _REAL.set(stream)
        try:
            yield
        finally:
            _REAL.reset(token)


def print_json(found: Any) -> None:
    """Print an object, or its JSON text, on the standard output of the command that is running."""
    text = found if isinstance(found, str) else json.dumps(found, indent=2)
    stream = _REAL.get() or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
