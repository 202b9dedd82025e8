"""Options and result of an export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings that a plan does not have, for targets that need them.

    plan_path: where the plan lies, as a launched job finds it. model: MODEL of the command line, instead of the one
    that the plan names. steps: training steps of a launched job. image: container image of a launched job. claim:
    persistent volume claim with the checkpoints of a launched job. predicted: a note of what the step takes on the
    target's software stack.
    """

    plan_path: str = "plan.yaml"
    model: str | None = None
    steps: int = 1000
    image: str | None = None
    claim: str | None = None
    predicted: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in another system's terms.

    name: what such a file is usually called. text: the file. notes: what of the plan the target cannot say, and what
    the target needs beside the file; where the format has comments they are in the file's head too.
    """

    target: str
    name: str
    text: str
    notes: tuple[str, ...]


def commented(notes: Sequence[str], heading: str, width: int = 118) -> str:
    """``heading`` and the notes as lines of comments that begin with ``#``."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    for note in notes:
        lines += [f"# {line}" for line in wrapped(note, width - 2)]
    return "\n".join(lines) + "\n"


def wrapped(note: str, width: int) -> list[str]:
    """A note as an item of a list. Line breaks in names that it quotes do not survive."""
    # A path or a name is never cut, so that it can be copied.
    return wrap(
        " ".join(note.split()),
        width,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
