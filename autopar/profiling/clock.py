"""Times what all ranks do at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import median

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Clock:
    """Repeats something for about ``seconds`` on every rank; ``device`` computes it."""

    device: torch.device
    seconds: float = 0.2
    most_repeats: int = 200

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of one call of ``run`` on the slowest rank. Every rank has to call this, with the same to do."""
        once = self._repeat(run, 1)  # which allocates
        if once < self.seconds:
            once = self._repeat(run, 1)
        # Repeats are agreed on: ranks that communicate need the same number.
        return self._repeat(run, max(1, min(self.most_repeats, ceil(self.seconds / max(once, 1e-9)))))

    def in_turn(self, *runs: Callable[[], object], rounds: int) -> tuple[float, ...]:
        """Seconds of one call of each on the slowest rank, the median of rounds in which each has its turn.

        What a machine does besides changes within seconds, so what is to be compared is measured side by side.
        """
        return tuple(map(median, zip(*self.rounds(*runs, number=rounds), strict=True)))

    def rounds(self, *runs: Callable[[], object], number: int) -> list[tuple[float, ...]]:
        """Seconds of each round."""
        for run in runs:
            self._repeat(run, 1)  # which allocates
        return [tuple(self._repeat(run, 1) for run in runs) for _ in range(number)]

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
