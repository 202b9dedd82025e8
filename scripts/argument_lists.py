"""For the API reference: lines of a docstring that begin with ``name:`` become a list, as they read in code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"^(\w+(?:, \w+)*): ")


class ArgumentLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Markdown of a docstring: every argument an item, its further lines indented under it."""
    lines, inside = [], False
    for line in text.splitlines():
        found = _ITEM.match(line)
        if found:
            if not inside:
                lines.append("")
            line, inside = f"- `{found[1]}`: {line[found.end() :]}", True
        elif inside and line.strip():
            line = f"  {line.strip()}"
        else:
            inside = False
        lines.append(line)
    return "\n".join(lines)
