"""How long a rank works itself in a step, rather than waits for others, by which slow ones are found.

On CPUs: the seconds until its batch is there, and those in which the thread that trains runs or waits for a core. In a
collective it sleeps, which is not counted; nor is a disk that is slow to write.

On GPUs, where kernels of collectives spin: the seconds of a product of matrices of a fixed size, the shortest of a few,
at most once a second. So a GPU with a lower clock is seen, and not a host that is slow to start kernels.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

import torch

_PROBE_EVERY_S = 1.0
_SIZE, _TIMES = 3072, 8


class OwnTime:
    """Of one rank, in the thread that trains."""

    def __init__(self, device: torch.device | None) -> None:
        """device: that trains; None to measure nothing."""
        self._probe = _Probe(device) if device is not None and device.type == "cuda" else None
        self._measures = device is not None
        self._start = self._loading = self._busy = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()

    def loaded(self) -> None:
        """Its batch is there."""
        self._loading = time.perf_counter() - self._start
        self._busy = _busy_s() if self._measures else 0.0

    def end(self) -> float:
        """Its seconds; NaN where they are not known yet."""
        if self._probe is not None:
            return self._probe.seconds()
        if not self._measures:
            return math.nan
        return self._loading + _busy_s() - self._busy


class _Probe:
    """The same small work on every GPU."""

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.full((_SIZE, _SIZE), 1 / _SIZE, dtype=torch.float16, device=device)
        self._product = torch.empty_like(self._factor)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMES + 1)]
        self._next, self._running, self._last = 0.0, False, math.nan

    def seconds(self) -> float:
        """Of the last one that is over; the next one is started, if it is time to. Nothing is waited for."""
        if self._running and self._events[-1].query():
            between = zip(self._events, self._events[1:], strict=False)
            self._last = min(first.elapsed_time(second) for first, second in between) / 1e3
            self._running = False
        now = time.monotonic()
        if not self._running and now > self._next:
            self._next, self._running = now + _PROBE_EVERY_S, True
            with torch.no_grad():
                for event in self._events[:-1]:
                    event.record()
                    torch.mm(self._factor, self._factor, out=self._product)
            self._events[-1].record()
        return self._last


def _busy_s() -> float:
    """Seconds that this thread has run or waited for a core."""
    waited_ns = 0
    with suppress(OSError, IndexError, ValueError):  # not on Linux
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.thread_time() + waited_ns / 1e9
