"""How a plan is drawn. The report stands above the plan, so it is given from above: imports go one way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class PlanPage(NamedTuple):
    """write: (plan, path), a page of HTML as a file. render: (plan), as text, for a notebook."""

    write: Callable[[Any, str | Path], None]
    render: Callable[[Any], str]


_given: list[PlanPage] = []


def draw_with(page: PlanPage) -> None:
    """Have plans drawn by ``page``; the package ``autopar`` does so when it is imported."""
    _given[:] = [page]


def write(plan: Any, path: str | Path) -> None:
    """Write the page of ``plan``."""
    _given[0].write(plan, path)


def render(plan: Any) -> str:
    """The page of ``plan``."""
    return _given[0].render(plan)
