"""Plans for several batches and lengths as a table on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from autopar.report.table import plain_table
from autopar.report.words import one_line, remat_level
from autopar.units import gib, percent, seconds

if TYPE_CHECKING:
    from autopar.planning_sizes import MixedPlan, SizedPlans


def print_sizes(found: SizedPlans, *, console: Console | None = None) -> None:
    """Prints the best plan for every size, and for every batch the best one over the mixture of lengths."""
    console = console or Console()
    table = plain_table()
    for name in ("batch", "length"):
        table.add_column(name, justify="right")
    table.add_column("plan")
    table.add_column("remat")
    for name in ("step", "tokens/s/GPU", "MFU", "memory"):
        table.add_column(name, justify="right")
    for own in found.found:
        size = str(own.batch), "" if own.length is None else str(own.length)
        if own.plan is None:
            table.add_row(*size, Text(own.reason.splitlines()[0], "yellow"), *[""] * 5)
            continue
        plan, prediction = own.plan, own.plan.prediction
        assert prediction is not None, "the search predicts what it returns"
        table.add_row(
            *size,
            one_line(plan),
            remat_level(plan),
            seconds(prediction.step_time_s),
            f"{prediction.tokens_per_s_per_gpu:,.0f}",
            percent(prediction.mfu),
            gib(prediction.peak_memory_bytes),
        )
    console.print(table)
    for mixed in found.mixed:
        console.print(_over_lengths(mixed), soft_wrap=True)
    for name, reason in found.fixed.items():
        console.print(Text(f"captured at each {name}: {reason}", "dim"), soft_wrap=True)
    once = "once" if found.num_captures == 1 else f"{found.num_captures} times"
    console.print(
        Text(f"captured {once} in {seconds(found.capture_time_s)}, searched in {seconds(found.search_time_s)}", "dim")
    )


def _over_lengths(mixed: MixedPlan) -> Text:
    at = ", ".join(f"{seconds(time)} at {length}" for length, time in mixed.at.items())
    of = f"the one for {mixed.length}, {one_line(mixed.plan)}"
    return Text(f"batch {mixed.batch}, over the shares: {of}: {seconds(mixed.step_time_s)} a step in the mean ({at})")
