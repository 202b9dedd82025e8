"""What a software stack keeps in memory, as far as stacks differ: state of the model, activations, allocator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """A cross entropy over logits of 16 bits: bytes a logit that it keeps between forward and backward, and that it
    works with beside them at its peak, the gradient that it hands on included."""

    kept: float
    working: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """What one stack keeps.

    lasting_gradients: whether gradients of all parameters are in a buffer from step to step, whole whatever ZeRO-1
    divides, in float32 but for the compute precisions in narrow_gradients; the optimiser then has a float32 copy of
    its part. buckets: whether data-parallel ranks have, beside that, buckets of all gradients as computed.
    regathers: whether a tensor that a product gathers is kept as the rank's part, and gathered once more in
    backward. recomputes: names of ops whose results a fused kernel makes again in backward instead of keeping them.
    loss: of cross entropies; None as our own runtime's. divides: whether losses with many logits are computed in
    chunks, and wide layers in tiles. releases_early: whether a backward that leaves gradients of weights for later
    keeps for them what their products read, and nothing else. first_delays: whether the first stage, which sends no
    gradient, has all of its backward in the weight-gradient pass. fragmentation: share of the activations that the
    caching allocator reserves beyond them. why: where all this is from.
    """

    lasting_gradients: bool = False
    narrow_gradients: frozenset[str] = frozenset()
    buckets: bool = False
    regathers: bool = False
    recomputes: frozenset[str] = frozenset()
    loss: LossMemory | None = None
    divides: bool = False
    releases_early: bool = False
    first_delays: bool = True
    fragmentation: float
    why: str

    def gradient_bytes(self, precision: str) -> int:
        """Bytes of a gradient of a parameter while it is added up, in compute of ``precision``."""
        return 2 if precision in self.narrow_gradients else 4
