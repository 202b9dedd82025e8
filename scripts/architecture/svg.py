"""A picture of boxes, lines and text, as SVG in the colours of reports, which has a light and a dark side.

Text is as wide as its letters in the widest font that a reader is likely to have, so that what does not overlap here
does not overlap anywhere; ``faults`` says what does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import combinations
from pathlib import Path

import autopar.report

_SHEET = Path(autopar.report.__file__).parent / "assets" / "plan.css"
_SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif'
_MONO = 'ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace'
_STYLE = f"""
text {{ font-family: {_SANS}; fill: var(--ink); }}
.code {{ font-family: {_MONO}; white-space: pre; }}
.bold {{ font-weight: 600; }}
.soft {{ fill: var(--soft); }}
.page {{ fill: var(--page); stroke: var(--line); }}
.card {{ fill: var(--card); stroke: var(--line); }}
.well {{ fill: var(--well); stroke: none; }}
.line {{ stroke: var(--faint); stroke-width: 1.5; fill: none; }}
.dashed {{ stroke: var(--faint); stroke-width: 1.2; stroke-dasharray: 4 3; fill: none; }}
.grid {{ stroke: var(--line); stroke-width: 1; fill: none; }}
.tip {{ fill: var(--faint); }}
"""
# Width of a letter, in font sizes: of DejaVu, the widest of the fonts above.
_WIDTHS = {"code": 0.605, "bold": 0.66}
_WIDTH = 0.6


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Pixels."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def overlaps(self, other: Rectangle) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)

    def contains(self, other: Rectangle) -> bool:
        wide = self.left <= other.left and other.right <= self.right
        return wide and self.top <= other.top and other.bottom <= self.bottom


@dataclass(slots=True)
class Picture:
    """width, height: pixels, to be set before ``svg``. title, description: what a screen reader says."""

    title: str
    description: str
    width: float
    height: float = 0.0
    _parts: list[str] = field(default_factory=list)
    _texts: list[Rectangle] = field(default_factory=list)
    _boxes: list[Rectangle] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, kind: str = "", *, size: float = 13, anchor: str = "start"
    ) -> Rectangle:
        """A line of text with its baseline at y. kind: classes of the style."""
        width = size * len(text) * max([_WIDTHS.get(one, _WIDTH) for one in kind.split()] or [_WIDTH])
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        self._texts.append(Rectangle(left, y - 0.8 * size, left + width, y + 0.25 * size, text))
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{kind}" font-size="{_n(size)}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )
        return self._texts[-1]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "card", *, tone: str = "") -> None:
        """A rectangle. tone: a colour of reports that fills it; then it is no frame of text."""
        fill = f' style="fill: var(--{tone}); stroke: none"' if tone else ""
        round_ = 0 if tone else 6
        if not tone:
            self._boxes.append(Rectangle(x, y, x + width, y + height, kind))
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{round_}" '
            f'class="{kind}"{fill}/>'
        )

    def line(self, *points: tuple[float, float], kind: str = "line", arrow: bool = False) -> None:
        """A line through points. arrow: with a tip at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        if arrow:
            length = max(abs(x1 - x0) + abs(y1 - y0), 1e-9)
            dx, dy = (x1 - x0) / length, (y1 - y0) / length
            points = (*points[:-1], (x1 - 5 * dx, y1 - 5 * dy))
            tip = ((x1, y1), (x1 - 8 * dx - 4 * dy, y1 - 8 * dy + 4 * dx), (x1 - 8 * dx + 4 * dy, y1 - 8 * dy - 4 * dx))
            self._parts.append(f'<polygon class="tip" points="{_points(tip)}"/>')
        self._parts.append(f'<polyline class="{kind}" points="{_points(points)}"/>')

    def faults(self) -> Iterator[str]:
        """Texts that overlap, leave the picture, or cross the edge of a box."""
        page = Rectangle(0, 0, self.width, self.height, "the picture")
        for one in self._texts:
            if not page.contains(one):
                yield f"{one.what!r} leaves the picture"
            for box in self._boxes:
                if box.overlaps(one) and not box.contains(one):
                    yield f"{one.what!r} crosses the edge of a box"
        for one, other in combinations(self._texts, 2):
            if one.overlaps(other):
                yield f"{one.what!r} overlaps {other.what!r}"

    def svg(self) -> str:
        """The picture. Raises AssertionError where it is not legible."""
        assert not (faults := list(self.faults())), "\n".join(faults)
        size = f"{_n(self.width)} {_n(self.height)}"
        inner = f'width="{_n(self.width - 1)}" height="{_n(self.height - 1)}"'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(self.width)}" height="{_n(self.height)}" '
                f'viewBox="0 0 {size}" role="img" aria-labelledby="t d">',
                f'<title id="t">{escape(self.title)}</title>',
                f'<desc id="d">{escape(self.description)}</desc>',
                f"<style>{_colours()}{_STYLE}</style>",
                f'<rect class="page" x="0.5" y="0.5" {inner} rx="10"/>',
                *self._parts,
                "</svg>\n",
            )
        )


def _colours() -> str:
    """The colours of reports, light and dark."""
    sheet = re.sub(r"/\*.*?\*/", "", _SHEET.read_text(), flags=re.DOTALL)
    return sheet[: sheet.index("* {")]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(number: float) -> str:
    return f"{number:.1f}".rstrip("0").rstrip(".")
