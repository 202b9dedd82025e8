"""Times what all ranks do at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

_PARTS = 3


@dataclass(frozen=True, slots=True)
class Clock:
    """Repeats something for about ``seconds`` on every rank; ``device`` computes it."""

    device: torch.device
    seconds: float = 0.2
    most_repeats: int = 200

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of one call of ``run`` on the slowest rank. Every rank has to call this, with the same to do."""
        for _ in range(2):  # the first call allocates
            once = self._repeat(run, 1)
        # Repeats are agreed on: ranks that communicate need the same number.
        repeats = max(1, min(self.most_repeats, ceil(self.seconds / max(once, 1e-9))))
        # In parts, as now and then something else takes the machine's time.
        parts = min(_PARTS, repeats)
        return min(self._repeat(run, ceil(repeats / parts)) for _ in range(parts))

    def _repeat(self, run: Callable[[], object], repeats: int) -> float:
        dist.barrier()
        self._synchronise()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        self._synchronise()
        taken = torch.tensor((time.perf_counter() - start) / repeats, dtype=torch.float64, device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
