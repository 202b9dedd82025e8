"""Where the time of a supervised job goes: what its goodput is, with its parts."""

from __future__ import annotations

import time

from autopar.ir.goodput import TimeParts
from autopar.supervision.progress import RankProgress
from autopar.units import percent, seconds

_WORDS = {
    "degraded": "fewer ranks",
    "lost_work": "steps that were lost",
    "detection": "ending ranks",
    "restart": "starting ranks",
    "replanning": "deciding and planning",
    "waiting": "waiting",
}


class GoodputMeter:
    """Adds up the times of one supervisor; of all ranks on its host the last counts."""

    def __init__(self) -> None:
        self.parts = TimeParts()
        self._mark = time.monotonic()

    def decided(self) -> None:
        """It is known what the next generation does, and its programs are there."""
        self._add(replanning=self._lap())

    def ran(self, stands: list[RankProgress], stopped: float, share: float, *, done: bool) -> None:
        """A generation has ended. stands: of its ranks. stopped: when it was known that it ends, of ``time.monotonic``.
        share: of the ranks that the job was started with."""
        begun, last = min((s.began for s in stands), default=0.0), max((s.since for s in stands), default=0.0)
        start = self._mark
        if not stands or not begun:
            self._add(restart=stopped - start)
        else:
            trained = max(0.0, (stopped if done else last) - begun)
            self._add(restart=begun - start, training=trained * share, degraded=trained * (1 - share))
            self._add(lost_work=0.0 if done else stopped - last)
        self._mark = stopped
        self._add(detection=self._lap())

    def __str__(self) -> str:
        parts = [f"{words} {seconds(spent)}" for name, words in _WORDS.items() if (spent := getattr(self.parts, name))]
        return f"goodput {percent(self.parts.goodput)} of {seconds(self.parts.total)}: {', '.join(parts)}"

    def _lap(self) -> float:
        now = time.monotonic()
        since, self._mark = now - self._mark, now
        return since

    def _add(self, **spent: float) -> None:
        self.parts += TimeParts(**{name: max(0.0, value) for name, value in spent.items()})
