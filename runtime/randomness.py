"""The random numbers of training: one seed and the place of a forward in the run decide them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from autopar.ir.lowered.random import shared_randomness
from autopar.runtime.stage_module import StageModule


class Randomness:
    """Gives each forward of a stage its random state: equal on all ranks of the stage, different in every call.

    From this state every random op derives the numbers of its shard, so that copies of an activation are dropped
    alike and shards of it independently. ``calls`` is the number of steps and plain forwards so far; evaluations do
    not count, so that training draws the same numbers with and without them.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.calls = 0
        self._evaluations = 0  # since the last call
        self._place: tuple[int, ...] = (0,)
        self._seed, self._device = seed, device

    def next_call(self) -> None:
        """A step or a plain forward begins."""
        self.calls += 1
        self._evaluations = 0
        self._place = (self.calls,)

    def next_evaluation(self) -> None:
        """A forward in eval mode begins, which may draw random numbers too."""
        self._evaluations += 1
        self._place = (self.calls, self._evaluations)

    def state(self) -> dict[str, int]:
        """State for ``restore`` to continue from here."""
        return {"seed": self._seed, "calls": self.calls}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a saved ``state``."""
        self._seed, self.calls = state["seed"], state["calls"]
        self._place = (self.calls,)

    def of(self, stage: StageModule, microbatch: int) -> AbstractContextManager[None]:
        """The random state for ``stage``'s forward of ``microbatch`` in this call. Outside, generators go on."""
        if not stage.is_random:
            return nullcontext()
        calls, *evaluations = self._place
        place = (calls, stage.program.stage, microbatch, *evaluations)
        return shared_randomness(self._seed, *place, devices=[self._device])
