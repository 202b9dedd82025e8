"""What a plan says of one pipeline stage, and of the passes of all of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from autopar.ir.list_scheduling import PassTimes, Urgent
from autopar.ir.predictions import strict
from autopar.ir.rematerialisation import LEVELS

_Microbatches = Annotated[int, Field(gt=0, le=1 << 20)]
_Ticks = Annotated[int, Field(gt=0, le=1000)]


class _Model(BaseModel):
    model_config = strict


class StagePlan(_Model):
    """Blocks ``first`` to ``last`` (inclusive, counted over all block instances in order).

    remat: level, or name of sets that its blocks list under ``kept`` -> number of this stage's blocks at it: from the
    first block on those at full, then alternate, then selective, then the sets as they stand; the rest keep their
    activations.
    offload: keep the parameters that ZeRO shards, their gradients and optimiser state in host memory; parameters are
    copied to the device to be gathered, and the optimiser runs on the CPU.
    on_disk: number of the stage's blocks, its last ones, of which that is in files on a local disk of each rank's node,
    and in host memory when it is used; None for none.
    """

    first: Annotated[int, Field(ge=0)]
    last: Annotated[int, Field(ge=0)]
    remat: dict[str, Annotated[int, Field(ge=0)]] = {}
    offload: bool = False
    on_disk: Annotated[int, Field(gt=0)] | None = None

    @property
    def remat_counts(self) -> tuple[tuple[str, int], ...]:
        """``remat`` in the order of the blocks."""
        levels = [(level, self.remat[level]) for level in reversed(LEVELS) if level in self.remat]
        return *levels, *((name, count) for name, count in self.remat.items() if name not in LEVELS)

    def remat_of(self, number: int) -> str:
        """Level, or name of a set, of the stage's block ``number``, counted from its first."""
        for name, count in self.remat_counts:
            if number < count:
                return name
            number -= count
        return "none"

    def is_on_disk(self, number: int) -> bool:
        """Whether what is offloaded of the stage's block ``number``, counted from its first, is on disk."""
        return number > self.last - self.first - (self.on_disk or 0)

    def check_disk(self, field: str) -> None:
        """Raise ValueError if ``on_disk``, which is the field of that name, contradicts the others."""
        blocks = self.last - self.first + 1
        if self.on_disk is not None and not self.offload:
            raise ValueError(
                f"{field}: {self.on_disk} blocks, and the stage offloads nothing.\n  try: offload: true for the stage"
            )
        if (self.on_disk or 0) > blocks:
            raise ValueError(f"{field}: {self.on_disk} blocks; the stage has {blocks}")


class PassesPlan(_Model):
    """What the order of passes of schedule ``found`` is found for (``autopar.ir.list_scheduling``).

    placement: of the stages on the ranks of the pipeline. forward, inputs, weights: ticks of the forward, the
    input-gradient and the weight-gradient pass of each stage. alive: of each rank of the pipeline, the most
    microbatches from their first forward there to their last weight gradients; waiting: the most passes of weight
    gradients that are put off.
    send: ticks until another rank has what a pass made. urgent: what goes first where a rank can do either.
    """

    placement: Literal["loop", "v"] = "loop"
    forward: list[_Ticks]
    inputs: list[_Ticks]
    weights: list[_Ticks]
    alive: list[_Microbatches]
    waiting: list[_Microbatches]
    send: Annotated[int, Field(ge=0, le=1000)] = 0
    urgent: Urgent = "inputs"

    @classmethod
    def of(cls, times: PassTimes, *, turns: bool) -> PassesPlan:
        """From what a search has found. turns: stages are placed in a v."""
        given = {name: list(own) if isinstance(own, tuple) else own for name, own in asdict(times).items()}
        return cls.model_validate({"placement": "v" if turns else "loop", **given})

    @property
    def times(self) -> PassTimes:
        """As list scheduling takes them."""
        lists = self.forward, self.inputs, self.weights, self.alive, self.waiting
        forward, inputs, weights, alive, waiting = map(tuple, lists)
        return PassTimes(
            forward=forward,
            inputs=inputs,
            weights=weights,
            alive=alive,
            waiting=waiting,
            send=self.send,
            urgent=self.urgent,
        )
