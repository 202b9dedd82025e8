"""One stage of a pipeline: its blocks, the rematerialisation of each, its seconds and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.offload import Offload
from autopar.ir.rematerialisation import LEVELS

FULL = LEVELS.index("full")


def recomputed_bytes(saved_bytes: Sequence[float], level: int, unmade_bytes: float) -> float:
    """Activations that a block makes again in its backward at once. saved_bytes: at each level. unmade_bytes: of those
    that level full does not make again, as it computes wide layers in tiles."""
    return max(0.0, saved_bytes[0] - saved_bytes[level] - (unmade_bytes if level == FULL else 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block in one plan.

    time_s, saved_bytes: per microbatch, at each of LEVELS, then with each set of tensors that are kept. delayed_bytes:
    of one whose weights' gradients wait. static_bytes: parameters, gradients, optimiser. fetched_bytes: that come back
    from host memory for a backward, at each level, if any do.
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
    fetched_bytes: tuple[float, ...] = ()

    def recomputed_bytes(self, level: int) -> float:
        """What its backward needs beside the workspace: activations that are made again, or come from host memory, at a
        level, and those of an equal block before it that are fetched ahead."""
        ahead = self.fetched_bytes[level] if self.fetched_bytes else 0.0
        return recomputed_bytes(self.saved_bytes, level, self.tiled_bytes) + ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks ``first`` to ``last``.

    remat: level, as an index into those of ``BlockCost``, and number of blocks at it, from the first block on; the rest
    are at the first level. offload: whether their tensors that ZeRO shards are in host memory. on_disk: number of
    blocks, the last ones, of which they are on disk instead.
    """

    first: int
    last: int
    remat: tuple[tuple[int, int], ...] = ()
    offload: bool = False
    on_disk: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.last - self.first + 1

    def at(self, offload: Offload) -> Stage:
        """The stage with all its blocks there."""
        on_disk = self.num_blocks if offload is Offload.DISK else 0
        return replace(self, offload=bool(offload), on_disk=on_disk)

    def place(self, block: int) -> Offload:
        """Where the tensors of block ``block`` are that ZeRO shards."""
        if not self.offload:
            return Offload.NONE
        return Offload.DISK if block > self.last - self.on_disk else Offload.HOST

    def level(self, block: int) -> int:
        """Index of the level of block ``block``."""
        offset = block - self.first
        for level, count in self.remat:
            if offset < count:
                return level
            offset -= count
        return 0

    @property
    def is_rematerialised(self) -> bool:
        """Whether any block is."""
        return any(count for level, count in self.remat if level)

    @property
    def levels(self) -> frozenset[int]:
        """Indices of the levels of its blocks."""
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
