"""What the next backward of a pipeline's rank takes from host memory first, fetched during the pass before it.

    2F3    2B0    2F4    2B1        the last block of 2B0 is fetched during 2F3, that of 2B1 during 2F4

A backward fetches it when it has begun its own last block, so that two blocks at a time are on the device.
"""

from __future__ import annotations

from itertools import pairwise

from autopar.ir.schedule import Action, Order, work_of
from autopar.runtime.host_activations import BlockOnHost, HostMemory


class HostPasses:
    """Of one rank. order: of its passes."""

    def __init__(self, memory: HostMemory, order: Order) -> None:
        self._memory = memory
        self._following = {one: (other.stage, other.microbatch) for one, other in pairwise(order) if other.kind != "F"}
        self._blocks: dict[tuple[int, int], BlockOnHost] = {}

    def begin(self, action: Action) -> None:
        """A pass begins."""
        following = self._following.get(action)
        self._memory.next_pass = None if following is None else self._blocks.get(following)
        if self._memory.next_pass is not None and work_of(action) not in ("B", "I"):
            self._memory.next_pass.fetch()

    def end_forward(self, stage: int, microbatch: int) -> None:
        """The forward of a microbatch in a stage has ended."""
        if self._memory.latest is not None:
            self._blocks[stage, microbatch] = self._memory.latest

    def end_backward(self, stage: int, microbatch: int) -> None:
        """Its whole backward has."""
        self._blocks.pop((stage, microbatch), None)
