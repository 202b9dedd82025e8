"""Goodput: the share of time in which a run trains, and what the rest of it goes to.

The same parts are predicted (``cost_model/goodput``), simulated and measured, so that they can be laid side by side.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TimeParts(_Model):
    """Where the time of a run goes, in seconds or as shares of it.

    training: of steps that lasted, at the speed of the plan on all its ranks. degraded: by which those steps took
    longer on fewer ranks. checkpoint, replicas: by which saving to disk, and copying to other hosts, delayed them.
    lost_work: of steps that were done and are done again. detection: from a failure until all ranks have ended.
    restart: until they train again, state loaded. replanning: for plans for fewer ranks or for more again. waiting: for
    repaired nodes.
    """

    training: NonNegativeFloat = 0.0
    degraded: NonNegativeFloat = 0.0
    checkpoint: NonNegativeFloat = 0.0
    replicas: NonNegativeFloat = 0.0
    lost_work: NonNegativeFloat = 0.0
    detection: NonNegativeFloat = 0.0
    restart: NonNegativeFloat = 0.0
    replanning: NonNegativeFloat = 0.0
    waiting: NonNegativeFloat = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(sum(self.by_name().values()))

    @property
    def goodput(self) -> float:
        """Training as a share of the sum; 1 of nothing."""
        return self.training / self.total if self.total else 1.0

    def by_name(self) -> dict[str, float]:
        """Part -> its time, training first."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def __add__(self, other: TimeParts) -> TimeParts:
        return TimeParts(**{name: value + getattr(other, name) for name, value in self.by_name().items()})

    def __mul__(self, factor: float) -> TimeParts:
        return TimeParts(**{name: value * factor for name, value in self.by_name().items()})

    __rmul__ = __mul__

    def shares(self) -> TimeParts:
        """The parts as shares of their sum."""
        return self * (1 / self.total) if self.total else TimeParts(training=1.0)


class GoodputPrediction(_Model):
    """What a run on the plan's cluster is predicted to get done, failures included, and how it should be protected.

    effective_tokens_per_day: of steps that last; samples where the plan counts those. failures_per_day: of the whole
    job. checkpoint_every_steps, checkpoint_every_s: from one checkpoint on disk to the next. replicate_every_steps:
    from one copy of each rank's state on another host to the next; None without copies. spare_nodes: beyond those of
    the plan. shares: of time; they add up to 1.
    """

    goodput: Annotated[float, Field(ge=0, le=1)]
    effective_tokens_per_day: NonNegativeFloat
    failures_per_day: NonNegativeFloat
    checkpoint_every_steps: PositiveInt
    checkpoint_every_s: PositiveFloat
    replicate_every_steps: PositiveInt | None = None
    spare_nodes: NonNegativeInt = 0
    shares: TimeParts
