"""Text drawings: which ranks a mesh axis joins, and the passes of a step along time.

tp 8    0 1 2 … 7     of one node   NVLink 4, 360 GB/s
dp 32   0 8 16 … 248  of 32 nodes   NDR InfiniBand, 45 GB/s

stage 0  F0-F1-   B0----F2-B1----F3-B2----B3----
stage 1     F0-B0----F1-B1----F2-B2----F3-B3----
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from autopar.cost_model.schedule.pipeline_simulator import Timeline
from autopar.ir.plan import Plan
from autopar.report.axes import axes, catalogued
from autopar.report.table import plain_table
from autopar.units import bytes_a_second, plural

# Ranks of the pipeline that are drawn; of more, so many that are evenly spread.
_MAX_ROWS = 16

_STYLES = {"F": "black on cyan", "B": "black on yellow", "I": "black on bright_red", "W": "black on green"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def drawn_mesh(plan: Plan, styles: dict[str, str]) -> RenderableType:
    """Every axis with the ranks of its first group, the link that it waits for, and what is divided over it."""
    table = plain_table("axis", "joins ranks", "of", "waits for", "divides")
    for axis in axes(plan, catalogued(plan)):
        name, size, stride = axis["name"], axis["size"], axis["stride"]
        shown = [str(number * stride) for number in range(min(size, 3))]
        if size > 3:
            shown += ["…"] * (size > 4) + [str((size - 1) * stride)]
        divided = [f"{plan.num_stages} stages"] if axis["pipeline"] else []
        divided += ["rows of the batch"] if axis["divides_inputs"] else []
        divided += [f"{use['factor']} of {plural(use['num_ops'], 'op')}" for use in axis["uses"]]
        table.add_row(
            Text(f"{name} {size}", styles.get(name, "bold")),
            " ".join(shown),
            "one node" if axis["num_nodes"] == 1 else plural(axis["num_nodes"], "node"),
            "" if axis["link"] is None else f"{axis['link']['name']}, {bytes_a_second(axis['link']['bandwidth'])}",
            ", ".join(divided),
        )
    return table


def drawn_timeline(plan: Plan, timeline: Timeline, width: int) -> RenderableType:
    """A row a rank of the pipeline, ``width`` columns wide: passes with their microbatches, as far as there is room."""
    places = range(plan.num_pipeline_ranks)
    if len(places) > _MAX_ROWS:
        places = range(0, len(places), -(-len(places) // _MAX_ROWS))
    one_each = plan.virtual_stages == 1
    names = [f"{'stage' if one_each else 'place'} {place}" for place in places]
    label = max(map(len, names)) + 2
    columns = max(10, width - label)
    step = timeline.step_time_s / columns
    text, used = Text(no_wrap=True), set[str]()
    for place, name in zip(places, names, strict=True):
        cells = [(" ", "")] * columns
        for event in timeline.events[place]:
            kind = event.action.kind
            used.add(kind)
            first, end = round(event.start_s / step), min(columns, round(event.end_s / step))
            drawn = f"{kind}{event.action.microbatch}".ljust(end - first, "-")
            cells[first:end] = [(letter, _STYLES[kind]) for letter in drawn[: end - first]]
        text.append(name.ljust(label))
        for cell, style in cells:
            text.append(cell, style)
        text.append("\n")
    text.append(" " * label)
    for letter in sorted(used):
        text.append(f" {letter} {_WORDS[letter]} ", _STYLES[letter])
        text.append(" ")
    text.append(f"waiting {timeline.bubble_fraction:.1%}", "dim")
    return text
