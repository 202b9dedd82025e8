"""What a rank says of itself to the supervisor that has forked it, through memory that both see."""

from __future__ import annotations

import math
import mmap
import struct
import time
from dataclasses import dataclass

_FIELDS = struct.Struct("<qqdd")
# Steps of which the rank's own seconds are kept: a supervisor looks at 20 together, when they are over.
_KEPT = 64
_OWN = struct.Struct(f"<{_KEPT}d")
# What a rank says of itself in words.
_SAID = _FIELDS.size + _OWN.size
_LENGTH, _WORDS = struct.Struct("<q"), 1 << 14


@dataclass(frozen=True, slots=True)
class RankProgress:
    """safe: steps of which all ranks have copies. steps: made. since: when that last changed. began: when this process
    made its first step; 0 before."""

    safe: int
    steps: int
    since: float
    began: float


class Progress:
    """A few numbers in memory that a fork shares."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SAID + _LENGTH.size + _WORDS)
        self._memory[_FIELDS.size : _SAID] = _OWN.pack(*[math.nan] * _KEPT)
        self.put(RankProgress(0, 0, time.monotonic(), 0.0))

    def get(self) -> RankProgress:
        """As the rank has said last."""
        return RankProgress(*_FIELDS.unpack_from(self._memory))

    def put(self, stand: RankProgress) -> None:
        """Say it."""
        _FIELDS.pack_into(self._memory, 0, stand.safe, stand.steps, stand.since, stand.began)

    @property
    def silent_s(self) -> float:
        """Since the last step, or since this was made."""
        return time.monotonic() - self.get().since

    def made(self, steps: int, safe: int, own_s: float | None = None) -> None:
        """A rank has made so many steps. own_s: seconds of the last one that it did not wait for others."""
        old, now = self.get(), time.monotonic()
        if own_s is not None:
            struct.pack_into("<d", self._memory, _FIELDS.size + 8 * (steps % _KEPT), own_s)
        self.put(RankProgress(safe, steps, now, old.began or now))

    def own_s(self, first: int, count: int) -> list[float] | None:
        """Own seconds of ``count`` steps from number ``first``, which have been made, on; NaN where they are not told.
        None if they are no longer kept."""
        if self.get().steps >= first + _KEPT:
            return None
        kept = _OWN.unpack_from(self._memory, _FIELDS.size)
        return [kept[step % _KEPT] for step in range(first, first + count)]

    def say(self, words: bytes) -> None:
        """Put down words in the place of those before; of more than there is room for, none."""
        words = words if len(words) <= _WORDS else b""
        _LENGTH.pack_into(self._memory, _SAID, 0)
        self._memory[_SAID + _LENGTH.size : _SAID + _LENGTH.size + len(words)] = words
        _LENGTH.pack_into(self._memory, _SAID, len(words))

    @property
    def said(self) -> bytes:
        """The words that were put down last; what is read while the rank writes may be of two."""
        (length,) = _LENGTH.unpack_from(self._memory, _SAID)
        start = _SAID + _LENGTH.size
        return self._memory[start : start + length]
