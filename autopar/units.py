"""Quantities as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """``1.234 s``, ``56.7 ms``, ``890 µs``."""
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def gib(num_bytes: float) -> str:
    """Bytes in binary gibibytes, or mebibytes below a tenth of one."""
    if num_bytes < 0.1 * 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def bytes_a_second(value: float) -> str:
    """Decimal, as links are specified: ``360 GB/s``."""
    return f"{significant(value / 1e9)} GB/s"


def significant(value: float) -> str:
    """Three significant digits, or all digits of a larger whole: ``0.0123``, ``171``, ``3,330``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(value: float) -> str:
    """A large number in words: ``12.3 million``, ``4.56 billion``."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def percent(fraction: float) -> str:
    """A fraction as percent with one decimal."""
    return f"{fraction * 100:.1f} %"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def of_flop(part: float, whole: float) -> str:
    """``12 of 38 GFLOP``: a part of floating point operations, both in the unit that suits the whole."""
    units = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))
    size, unit = next((one for one in units if whole >= one[0]), units[-1])
    return f"{significant(part / size)} of {significant(whole / size)} {unit}"
