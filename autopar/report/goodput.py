"""A predicted goodput in words."""

from __future__ import annotations

from autopar.ir.goodput import GoodputPrediction, TimeParts
from autopar.units import count, percent, plural, seconds

# A part of the time is named if it is this much of it.
_SHOWN = 5e-5

_HOUR_S, _MINUTE_S = 3600, 60


def goodput_words(found: GoodputPrediction, counted: str) -> str:
    """In a line: ``goodput 97.7 %: 174 billion tokens a day, checkpoint every 22 min, ...``. counted: tokens or
    samples."""
    copies = found.replicate_every_steps
    said = [
        f"{count(found.effective_tokens_per_day)} {counted} a day",
        f"checkpoint every {_interval(found.checkpoint_every_s)}",
        "no copies on other hosts"
        if copies is None
        else f"copies on other hosts every {'step' if copies == 1 else f'{copies} steps'}",
        plural(found.spare_nodes, "spare node"),
    ]
    return f"goodput {percent(found.goodput)}: {', '.join(said)}{_lost(found.shares)}"


def _lost(shares: TimeParts) -> str:
    """What the rest of the time goes to, the most first."""
    parts = [(share, name.replace("_", " ")) for name, share in shares.by_name().items() if name != "training"]
    named = [f"{name} {100 * share:.2g} %" for share, name in sorted(parts, reverse=True) if share >= _SHOWN]
    return f"; {', '.join(named)}" if named else ""


def _interval(value: float) -> str:
    """``34 min`` or ``2.5 h``; below two minutes in seconds."""
    if value >= 2 * _HOUR_S:
        return f"{value / _HOUR_S:.3g} h"
    return f"{value / _MINUTE_S:.0f} min" if value >= 2 * _MINUTE_S else seconds(value)
