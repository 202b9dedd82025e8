"""Tables on a terminal: columns without lines."""

from __future__ import annotations

from rich.table import Table


def plain_table(*columns: str, right: bool = False) -> Table:
    """A table with these heads, of numbers that end at the right or words that begin at the left."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    return table
