"""Least seconds of a pipeline step that any stage cuts of the blocks could have, with unlimited memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.schedule.pipeline_simulator import least_pipeline_time
from autopar.ir.schedule import Pipelining
from autopar.search.stages.stage import BlockCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimes:
    """Least seconds of a microbatch, of each block at its fastest rematerialisation level.

    total_s: of all blocks, but for once_s, their shares of what comes once a step. repeats: seconds and number of the
    blocks that take equally long. send_s: of a cut.
    """

    total_s: float
    once_s: float
    repeats: tuple[tuple[float, int], ...]
    send_s: float

    @classmethod
    def of(cls, blocks: Sequence[BlockCost]) -> LeastTimes:
        """Those of ``blocks``, in order."""
        fastest = [min(block.time_s) - block.once_s for block in blocks]
        sends = (block.send_s for block in blocks[1:])
        return cls(
            total_s=sum(fastest),
            once_s=sum(block.once_s for block in blocks),
            repeats=tuple(Counter(fastest).items()),
            send_s=min(sends, default=0.0),
        )

    def step_s(self, shape: Pipelining, links: Sequence[float]) -> float:
        """Lower bound on the closed form of a step: of n blocks that take t seconds each, some rank has ⌈n / P⌉.

        links: see ``stage_cuts.step_estimate``.
        """
        rank_s = max(seconds * -(-number // shape.num_ranks) for seconds, number in self.repeats)
        once_s = shape.num_microbatches * self.once_s / shape.num_ranks
        return least_pipeline_time(shape, self.total_s, rank_s, sum(links) * self.send_s) + once_s
