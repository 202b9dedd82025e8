"""What a rank says of itself to the supervisor that has forked it, through memory that both see."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_FIELDS = struct.Struct("<qqddd")


@dataclass(frozen=True, slots=True)
class Stand:
    """safe: steps of which all ranks have copies. steps: made. since: when that last changed. own_s: seconds of the
    last step that the rank did not wait for others. began: when this process made its first step; 0 before."""

    safe: int
    steps: int
    since: float
    own_s: float
    began: float


class Progress:
    """A few numbers in memory that a fork shares."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _FIELDS.size)
        self.put(Stand(0, 0, time.monotonic(), 0.0, 0.0))

    def get(self) -> Stand:
        """As the rank has said last."""
        return Stand(*_FIELDS.unpack(self._memory[:]))

    def put(self, stand: Stand) -> None:
        """Say it."""
        self._memory[:] = _FIELDS.pack(stand.safe, stand.steps, stand.since, stand.own_s, stand.began)

    def made(self, steps: int, safe: int, own_s: float = 0.0) -> None:
        """A rank has made so many steps."""
        old, now = self.get(), time.monotonic()
        self.put(Stand(safe, steps, now, own_s, old.began or now))
