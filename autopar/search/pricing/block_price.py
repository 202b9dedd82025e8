"""What one block costs on one rank: seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.cost_model.communication.collectives import point_to_point_time
from autopar.cost_model.communication.gradient_sync import BucketSync
from autopar.cost_model.communication.host_copies import HostCopies
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.device import Device, Link
from autopar.cost_model.memory.backward_peak import BackwardPeak
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.ir.rematerialisation import LEVELS
from autopar.search.pricing.host_link import host_copies
from autopar.search.pricing.kept_graph import KeptCost
from autopar.search.stages.stage import FULL, recomputed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """One block instance on one rank.

    compute, communication: of one microbatch, forward and backward. recomputed: what both take longer for the sake of
    recomputation, at each of LEVELS, then with each set of ``Pricing.kept``, as everything that is by level;
    bookkeeping: the part of it that is no op, wherever anything is recomputed. sync: gradient and ZeRO communication,
    not yet overlapped. optimiser_s: once a step.
    weights_s: seconds of the backward that a split backward may delay (its W pass); twice_s, delayed_bytes: seconds
    that it then spends twice, and bytes of a microbatch that it holds until then. states: bytes held inside a step,
    lasting_bytes of them gradients allocated from the step before. resting, optimiser_bytes: bytes held while the
    optimiser runs, and its workspace for a parameter. saved_bytes: activations of a microbatch at each level; host: of
    those that wait in host memory.
    unmade_bytes: of activations that level full does not make again, since it computes wide layers in tiles. peak,
    tiled_peak: further bytes of the backward, and at level full. gathered_bytes: parameters that ZeRO has gathered
    while the block runs, without prefetched ones; unsharded_bytes: their gradients, as computed; scattered_bytes: the
    buffer that those are scattered from. send_bytes: of a microbatch, for a cut before this block; None where it cannot
    be cut. returned_bytes: of the gradients that come back over the cut. shared_bytes: that the block saves and the one
    before it does too, which are not among ``saved_bytes``.
    """

    compute: OpTime
    communication: OpTime
    recomputed: tuple[OpTime, ...]
    bookkeeping: OpTime
    weights_s: float
    twice_s: float
    delayed_bytes: float
    sync: BucketSync
    optimiser_s: float
    states: MemoryParts
    lasting_bytes: float
    resting: MemoryParts
    optimiser_bytes: float
    saved_bytes: tuple[float, ...]
    host: tuple[HostCopies, ...] = (HostCopies(),) * len(LEVELS)
    unmade_bytes: float
    peak: BackwardPeak
    tiled_peak: BackwardPeak
    gathered_bytes: float
    unsharded_bytes: float
    scattered_bytes: float
    send_bytes: float | None
    returned_bytes: float
    shared_bytes: float = 0.0

    def send_s(self, link: Link) -> float:
        """Seconds to send a microbatch over a cut before this block; infinite where it cannot be cut."""
        return inf if self.send_bytes is None else point_to_point_time(self.send_bytes, link)

    def return_s(self, link: Link) -> float:
        """Seconds to send the gradients of a microbatch back over that cut; 0 where there are none."""
        return point_to_point_time(self.returned_bytes, link) if self.returned_bytes else 0.0

    def working_bytes(self, prefetch: int, level: int = 0) -> float:
        """Most bytes while the block runs backward, beside states and activations that are saved or made again."""
        peak = self.peak_of(level)
        if not self.scattered_bytes:
            return peak.merged + (1 + prefetch) * self.gathered_bytes
        inside = peak.unsharded + self.gathered_bytes
        return max(inside, peak.end + self.unsharded_bytes) + self.scattered_bytes + prefetch * self.gathered_bytes

    def recomputed_bytes(self, level: int) -> float:
        """Activations that the block makes again in its backward at once, at a level."""
        return recomputed_bytes(self.saved_bytes, level, self.unmade_bytes)

    def peak_of(self, level: int) -> BackwardPeak:
        """Further bytes of the backward, at a level."""
        return self.tiled_peak if level == FULL else self.peak

    def keeping(self, kept: Sequence[KeptCost | None], device: Device, link: OpTime) -> BlockPrice:
        """The price with these sets of tensors beside the levels. None: of everything. link: seconds in which other
        copies take the link to the host."""
        every = [KeptCost(self.saved_bytes[0], 0.0, 0.0, 0.0) if own is None else own for own in kept]
        recomputed = [OpTime(0.0, own.seconds) + self.bookkeeping if own.seconds else ZERO for own in every]
        copies = (
            host_copies(own, device, self.computed(added), link) for own, added in zip(every, recomputed, strict=True)
        )
        return replace(
            self,
            saved_bytes=(*self.saved_bytes, *(own.num_bytes - own.host_bytes for own in every)),
            recomputed=(*self.recomputed, *recomputed),
            host=(*self.host, *copies),
        )

    def passing(self, passed_bytes: float) -> BlockPrice:
        """The price where the next block keeps ``passed_bytes`` of what this one saves without rematerialisation."""
        first, *others = self.saved_bytes
        return replace(self, saved_bytes=(max(0.0, first - passed_bytes), *others)) if passed_bytes else self

    def beside(self, constants: float, shared: float) -> BlockPrice:
        """The price with bytes of constants that the block keeps at every level, and ``shared_bytes``."""
        saved = tuple(max(0.0, num_bytes + constants - shared) for num_bytes in self.saved_bytes)
        return replace(self, saved_bytes=saved, shared_bytes=shared) if constants or shared else self

    def computed(self, recomputed: OpTime = ZERO) -> OpTime:
        """Seconds of one microbatch, without ZeRO's gathers and scatters and copies to the host."""
        return self.compute + self.communication + recomputed

    def forward_s(self, level: int) -> float:
        """Seconds of one microbatch, without ZeRO's gathers."""
        return self.computed(self.recomputed[level]).forward_s + self.host[level].added.forward_s

    def backward_s(self, level: int) -> float:
        """Seconds of one microbatch, without ZeRO's gathers and scatters."""
        return self.computed(self.recomputed[level]).backward_s + self.host[level].added.backward_s
