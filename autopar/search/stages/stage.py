"""One stage of a pipeline: its blocks, the rematerialisation level of each, its seconds and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Rematerialisation levels, from that which saves most; ``autopar.cost_model.memory.activations`` says what each keeps.
LEVELS = ("none", "selective", "alternate", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block in one plan.

    time_s, saved_bytes: per microbatch, at each of LEVELS. delayed_bytes: of one whose weights' gradients wait.
    static_bytes: parameters, gradients, optimiser.
    workspace_bytes: held only while the block runs. tiled_bytes: that level full needs less, as it computes wide
    layers in tiles. send_s: of a cut before this block. once_s: of ``time_s``, the share of what comes once a step;
    first_s: of that, what the first forward waits for.
    """

    time_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    static_bytes: float
    delayed_bytes: float = 0.0
    workspace_bytes: float = 0.0
    tiled_bytes: float = 0.0
    send_s: float = 0.0
    once_s: float = 0.0
    first_s: float = 0.0

    def recomputed_bytes(self, level: int) -> float:
        """What its backward needs beside the workspace: activations that are made again, at one of LEVELS."""
        unmade = self.tiled_bytes if LEVELS[level] == "full" else 0.0
        return max(0.0, self.saved_bytes[0] - self.saved_bytes[level] - unmade)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks ``first`` to ``last``: the first ``full`` at level full, ``alternate`` at level alternate, and so on.

    offload: whether their tensors that ZeRO shards are in host memory.
    """

    first: int
    last: int
    full: int = 0
    alternate: int = 0
    selective: int = 0
    offload: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.last - self.first + 1

    def level(self, block: int) -> int:
        """Index into LEVELS for block ``block``."""
        offset = block - self.first
        for level, count in ((3, self.full), (2, self.alternate), (1, self.selective)):
            if offset < count:
                return level
            offset -= count
        return 0

    @property
    def strongest(self) -> int:
        """Index into LEVELS of the strongest level of a block."""
        return self.level(self.first)

    @property
    def levels(self) -> frozenset[int]:
        """Indices into LEVELS of the levels of its blocks."""
        return frozenset(self.level(block) for block in range(self.first, self.last + 1))


def stage_time(blocks: Sequence[BlockCost], stage: Stage) -> float:
    """Seconds of one microbatch, forward and backward."""
    return sum(blocks[b].time_s[stage.level(b)] for b in range(stage.first, stage.last + 1))


def stage_memory(blocks: Sequence[BlockCost], stage: Stage, live: int, waiting: int = 0) -> float:
    """Bytes a rank of the stage needs that saves the activations of ``live`` microbatches. waiting: others, of which
    it has only the gradients of weights left to compute."""
    inside = range(stage.first, stage.last + 1)
    return (
        sum(blocks[b].static_bytes + waiting * blocks[b].delayed_bytes for b in inside)
        + live * sum(blocks[b].saved_bytes[stage.level(b)] for b in inside)
        + max(blocks[b].workspace_bytes for b in inside)
        + max(blocks[b].recomputed_bytes(level) for b in inside for level in stage.levels)
    )
