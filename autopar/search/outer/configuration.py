"""A configuration of the outer search, the solution of its inner problem, and the candidate plan that both make."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.list_scheduling import PassTimes
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.ir.rule import Assignment
from autopar.ir.schedule import Pipelining, Schedule
from autopar.search.predict.predict import Predicted, predict
from autopar.search.pricing.block_prices import Priced, evaluate
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.constraints import Constraints, role_of_axis
from autopar.search.stages.least_times import LeastTimes
from autopar.search.stages.stage import BlockCost, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A point of the outer search. num_stages: ranks of the pipeline, of ``virtual_stages`` stages each.

    schedule, virtual_stages: the plainest that the constraints admit; ``complete`` tries the others. passes, turns: see
    ``Pipelining``.
    data_axes: the axes that ZeRO shards over; on others, gradients of sharded parameters are all-reduced.
    offload: where tensors that ZeRO shards are.
    constraints: limits on the choices of ops on the axes of ``mesh``.
    """

    num_stages: int
    mesh: Mesh
    num_microbatches: int
    zero: int
    data_axes: tuple[int, ...]
    constraints: Constraints
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    passes: PassTimes | None = None
    turns: bool = False
    batch_axes: tuple[int, ...] | None = None
    offload: Offload = Offload.NONE

    @property
    def pipelining(self) -> Pipelining:
        """Schedule, ranks, microbatches and virtual stages of the pipeline."""
        return Pipelining(
            self.schedule, self.num_stages, self.num_microbatches, self.virtual_stages, self.passes, self.turns
        )

    @property
    def kind(self) -> str:
        """Usual name of the strategy, such as ``FSDP, ZeRO-3`` or ``tensor and pipeline parallel``."""
        sizes = {"dp": 0, "tp": 1, "cp": 1, "ep": 1}
        for axis in self.mesh.axes:
            role = role_of_axis(axis.name) or "dp"
            sizes[role] = sizes[role] + 1 if role == "dp" else axis.size
        words = {"expert": sizes["ep"], "context": sizes["cp"], "tensor": sizes["tp"], "pipeline": self.num_stages}
        if used := [word for word, size in words.items() if size > 1]:
            return " and ".join(used) + " parallel"
        if not self.zero:
            return "DDP"
        return f"{'HSDP' if sizes['dp'] > 1 else 'FSDP'}, ZeRO-{self.zero}"

    def __str__(self) -> str:
        zero = f", zero {self.zero}{self.offload.words}" if self.zero else ""
        return f"pp={self.num_stages} on {self.mesh}, {self.num_microbatches} microbatches{zero}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A complete plan of a configuration.

    assignment: of each op cluster, by its index. estimate_s: seconds of a step in the closed form of the schedule.
    pruned: this estimate already exceeds the incumbent by 10 %; the plan is not simulated.
    """

    configuration: Configuration
    pricing: Pricing
    assignment: tuple[Assignment, ...]
    priced: Priced
    stages: tuple[Stage, ...]
    estimate_s: float = 0.0
    pruned: bool = False

    @cached_property
    def predicted(self) -> Predicted:
        """Prediction of the simulated step."""
        return predict(self.pricing, self.assignment, self.priced, self.stages, self.configuration.pipelining)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step: of the simulation, or the estimate of a pruned plan."""
        return self.estimate_s if self.pruned else self.predicted.step_time_s

    @property
    def is_rematerialised(self) -> bool:
        """Whether any block is rematerialised."""
        return any(stage.is_rematerialised for stage in self.stages)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inner:
    """An answer to the inner problem under some weights.

    assignment: of each op cluster, by its index. objective: its value, seconds of a step on one stage mesh.
    shared_once: see ``evaluate``. given: ``priced``, if it is known.
    """

    pricing: Pricing
    assignment: tuple[Assignment, ...]
    objective: float
    shared_once: bool
    given: Priced | None = None
    _costs: dict[int, tuple[BlockCost, ...]] = field(default_factory=dict)
    _least: dict[int, LeastTimes] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Candidate) -> Inner:
        """The answer that a plan was made of, whose stages may be cut anew."""
        return cls(
            pricing=found.pricing,
            assignment=found.assignment,
            objective=0.0,
            shared_once=found.configuration.num_stages == 1,
            given=found.priced,
        )

    @cached_property
    def priced(self) -> Priced:
        """Prices block by block; answers that only serve as bounds never compute them."""
        return self.given or evaluate(self.pricing, self.assignment, shared_once=self.shared_once)

    def costs(self, num_ranks: int) -> tuple[BlockCost, ...]:
        """Costs of the blocks for a pipeline of ``num_ranks`` ranks, the input of the stage cuts."""
        if num_ranks not in self._costs:
            self._costs[num_ranks] = self.priced.block_costs(self.pricing, num_ranks)
        return self._costs[num_ranks]

    def least_times(self, num_ranks: int) -> LeastTimes:
        """The least seconds of the blocks for a pipeline of ``num_ranks`` ranks."""
        if num_ranks not in self._least:
            self._least[num_ranks] = LeastTimes.of(self.costs(num_ranks))
        return self._least[num_ranks]
