"""What fused attention achieves, by head size, length and mask, forward and backward.

A rate counts the two products of the forward, and two and a half times as much in the backward, where the scores are
computed again; of a causal mask, half of them. Heads are padded to what a kernel has tiles for: attention of 80-wide
heads takes as long as of 96-wide ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Multiples of elements that heads are padded to: of 80, 96 and 128 the H200 took equally long for tiles of 32.
PADDED_TO = 32
# Keys of a tile (recalled: FlashAttention-2 and 3 and cuDNN, heads of 64 and 128). One that the edge of a mask runs
# through is computed whole.
TILE = 128
# Keys of a block of torch's kernel for CPUs (``kvSplitSize``; causal attention took as long as full for up to 512 keys,
# 0.76 of it for 1,024 and 0.57 for 2,048, where whole blocks are 0.75 and 0.63).
KEYS_OF_BLOCK = 512
# Products of the backward over those of the forward: four, and the scores again.
BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class Curve:
    """Fractions of the peak under a full mask for heads of a size, at each of ``LENGTHS``."""

    head: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One kernel on devices of one architecture.

    curves: by head size, the smallest first. causal: at each of ``LENGTHS``, the rate under a causal mask over that
    under a full one. source: who measured it, and on what. early: FlashAttention in Triton, of which training runs say
    more than the paper that compares it.
    """

    name: str
    curves: tuple[Curve, ...]
    causal: tuple[float, ...]
    source: str
    early: bool = False

    @property
    def typical(self) -> float:
        """The fraction of forward and backward together, for one figure: causal, 8,192 keys, heads of 128."""
        forward, backward = self.fractions(128, 8192, causal=True)
        return (1 + BACKWARD) / (1 / forward + BACKWARD / backward)

    def fractions(
        self, head: float, length: float, *, causal: bool, window: float | None = None
    ) -> tuple[float, float]:
        """Fractions of the peak, forward and backward, of attention of heads of a size to ``length`` keys.

        window: the last keys that a query sees, if not all of them. That takes as long for each key as a causal mask
        over so many, which has the near edge, and half a tile more at the far edge.
        """
        padded = PADDED_TO * ceil(head / PADDED_TO)
        whole = 1.0
        if window is not None and window < length:
            length, whole = window, window / (window + TILE / 2)
        masked = _at(self.causal, length) if causal else 1.0
        share = whole * masked * head / padded
        heads = [curve.head for curve in self.curves]
        forward, backward = (
            _between(heads, [_at(part, length) for part in parts], padded)
            for parts in ([c.forward for c in self.curves], [c.backward for c in self.curves])
        )
        return share * forward, share * backward


def by_logarithm(known: Sequence[tuple[float, float]], size: float) -> float:
    """Of (size, value), the smallest first: linear between the logarithms of known sizes, constant beyond them."""
    return _between([log2(one) for one, _ in known], [value for _, value in known], log2(max(1.0, size)))


def share_of_blocks(length: float, block: int) -> float:
    """Share of all scores that are in the blocks of keys, of which each query sees some under a causal mask."""
    starts = range(0, ceil(length), block)
    return sum((min(start + block, length) - start) * min(start + block, length) for start in starts) / length**2


def _at(values: Sequence[float], length: float) -> float:
    return by_logarithm(list(zip(LENGTHS, values, strict=True)), length)


def _between(known: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """Linear between the known places, constant beyond them."""
    for (left, low), (right, high) in zip(
        zip(known, values, strict=True), zip(known[1:], values[1:], strict=True), strict=False
    ):
        if wanted <= left:
            return low
        if wanted < right:
            return low + (high - low) * (wanted - left) / (right - left)
    return values[-1]
