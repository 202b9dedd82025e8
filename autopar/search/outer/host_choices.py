"""What of the tensors that a block keeps may wait in host memory: all of it, or as much as its copies are hidden of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_model.communication.host_copies import added_by_copies, hidden_bytes
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.memory.kept_frontier import KeptSet, PricedForward
from autopar.ir.kept_lists import INPUTS
from autopar.search.pricing.block_prices import Priced
from autopar.search.pricing.host_link import link_taken
from autopar.search.pricing.pricing import Pricing


class Sent(NamedTuple):
    """What of a set waits in host memory, by its names in a plan, its bytes, and the seconds that its copies add."""

    names: tuple[str, ...]
    num_bytes: float
    added_s: float


@dataclass(frozen=True, slots=True)
class HostLink:
    """Of the blocks of a kind. computed, taken: seconds of one without recomputation, and in which others take the
    link."""

    device: Device
    computed: OpTime
    taken: OpTime

    def choices(self, forward: PricedForward, kept: KeptSet, names: Sequence[str]) -> Iterator[Sent]:
        """All of a set, and as much of it as is hidden, the largest tensors first. names: of what is kept."""
        sizes = {name: forward.on_host(kept, (name,))[0] for name in (*names, INPUTS)}
        every = tuple(name for name, size in sizes.items() if size)
        computed = self.computed + OpTime(0.0, kept.seconds)
        room, hidden = hidden_bytes(self.device, computed, self.taken), set[str]()
        for name in sorted(every, key=lambda name: -sizes[name]):
            if sizes[name] <= room:
                hidden.add(name)
                room -= sizes[name]
        for sent in dict.fromkeys((every, tuple(name for name in every if name in hidden))):
            if sent:
                num_bytes = sum(sizes[name] for name in sent)
                yield Sent(sent, num_bytes, added_by_copies(num_bytes, self.device, computed, self.taken).total_s)


def host_links(pricing: Pricing, priced: Priced) -> list[HostLink]:
    """Of each kind of block, by its first one."""
    found: dict[int, HostLink] = {}
    for block, price in zip(pricing.workload.repetition.blocks, priced.blocks, strict=True):
        if block.kind not in found:
            taken = link_taken(pricing, priced.held.get(block.index, ()))
            found[block.kind] = HostLink(pricing.ops.cluster.device, price.computed(), taken)
    return [found[kind] for kind in sorted(found)]
