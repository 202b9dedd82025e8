"""Sizes and shares as flags state them."""

from __future__ import annotations

from autopar.ir.errors import InvalidInput

# Of a batch or a length; a tensor of both, and of a model's width, can still be counted in 64 bits.
_LARGEST = 1 << 24


def sizes_of(text: str | None, flag: str) -> tuple[int, ...]:
    """``2048,8192`` as it is, ``256:1024`` as 256, 512 and 1024; none if there is no text. Raises InvalidInput."""
    if text is None:
        return ()
    found: list[int] = []
    try:
        for part in text.split(","):
            first, *last = map(int, part.split(":"))
            found.append(first)
            while last and 0 < 2 * found[-1] <= last[0]:
                found.append(2 * found[-1])
            if len(last) > 1 or (last and found[-1] != last[0]):
                raise ValueError
    except ValueError:
        raise InvalidInput(
            f"{flag} {text!r:.200} is not understood.\n  expected numbers, 2048,8192, or a first and a last one with "
            "doublings in between, 256:4096"
        ) from None
    if min(found) < 1 or max(found) > _LARGEST or len(set(found)) < len(found):
        raise InvalidInput(f"{flag} {text!r:.200}: expected different numbers from 1 to {_LARGEST:,}")
    return tuple(found)


def shares_of(text: str | None) -> tuple[float, ...]:
    """``0.8,0.2`` as numbers. Raises InvalidInput."""
    if text is None:
        return ()
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise InvalidInput(f"--shares {text!r} is not understood.\n  expected numbers: 0.8,0.2") from None
    if not all(0 <= share < float("inf") for share in found) or not sum(found):
        raise InvalidInput(f"--shares {text!r}: expected shares of 0 or more, one of them above 0")
    return found
