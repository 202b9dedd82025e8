"""Lengths of documents, and the steps predicted for them, on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from autopar.report.table import plain_table
from autopar.units import percent, plural, seconds, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopar.ir.plan import LengthsPrediction

_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
# Bars of the chart at most, and characters of the longest.
_BARS, _WIDTH = 16, 40


def described(lengths: Sequence[int]) -> dict[str, Any]:
    """Figures of some lengths, in tokens. percentiles: length that so many percent are at most as long as."""
    rising = sorted(lengths)
    at = {f"{share * 100:g}": rising[min(len(rising) - 1, int(share * len(rising)))] for share in _SHARES}
    total = sum(rising)
    return {
        "documents": len(rising),
        "tokens": total,
        "mean": total / len(rising),
        "mean_by_token": sum(n * n for n in rising) / total,
        "shortest": rising[0],
        "longest": rising[-1],
        "percentiles": at,
    }


def print_lengths(found: dict[str, Any], lengths: Sequence[int], *, console: Console | None = None) -> None:
    """Prints the figures of ``described`` and a chart: of each doubling, the documents and the tokens in them."""
    console = console or Console(highlight=False)
    console.print(
        f"{plural(found['documents'], 'document')} of {found['tokens']:,} tokens: {found['mean']:,.0f} in the mean, "
        f"{found['shortest']:,} to {found['longest']:,}; a token's document has {found['mean_by_token']:,.0f}",
        soft_wrap=True,
    )
    table = plain_table(*(f"{share} %" for share in found["percentiles"]), right=True)
    table.add_row(*(f"{length:,}" for length in found["percentiles"].values()))
    console.print(table)
    doubled = [n.bit_length() - 1 for n in lengths]
    step = 1 + (max(doubled) - min(doubled)) // _BARS
    counts: dict[int, int] = {}
    for power in doubled:
        counts[power // step] = counts.get(power // step, 0) + 1
    most = max(counts.values())
    chart = plain_table("tokens", "documents", "")
    for power in range(min(counts), max(counts) + 1):
        count = counts.get(power, 0)
        bar = "█" * round(_WIDTH * count / most) or "▏" * bool(count)
        chart.add_row(f"{2 ** (power * step):,} and more", f"{count:,}", Text(bar, "green"))
    console.print(chart)


def in_words(found: LengthsPrediction) -> str:
    """The steps on documents of a histogram."""
    kind = (
        f"packed into rows of {found.max_tokens:,}"
        if found.packed
        else f"one a row, padded, {found.max_tokens:,} at most"
    )
    padding = 1 - found.document_tokens / found.computed_tokens
    waiting = max(0.0, 1 - found.even_step_time_s / found.step_time_s)
    return (
        f"documents {kind}: {seconds(found.step_time_s)} a step in the mean of {found.num_batches} batches, "
        f"{seconds(found.fast_step_time_s)} to {seconds(found.slow_step_time_s)} for eight in ten, "
        f"{significant(found.document_tokens_per_s_per_gpu)} tokens of documents/s/GPU, "
        f"{percent(padding)} padding, {percent(waiting)} waiting as documents differ"
    )
