"""What the outer search decides, what the inner problem answers, and the plan that both make."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment
from autopar.ir.schedule import Pipelining, Schedule
from autopar.search.predict.predict import Predicted, predict
from autopar.search.pricing.block_prices import Priced, evaluate
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.constraints import Constraints, role_of_axis
from autopar.search.stages.stage import BlockCost, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What the outer search decides. num_stages: ranks of the pipeline, of ``virtual_stages`` stages each.

    schedule, virtual_stages: the plainest that the constraints admit; ``complete`` tries the others.
    data_axes: those that ZeRO shards over; on others, gradients of what is sharded are all-reduced.
    offload: what ZeRO shards is in host memory.
    constraints: what ops may do on the axes of ``mesh``.
    """

    num_stages: int
    mesh: Mesh
    num_microbatches: int
    zero: int
    data_axes: tuple[int, ...]
    constraints: Constraints
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    batch_axes: tuple[int, ...] | None = None
    offload: bool = False

    @property
    def pipelining(self) -> Pipelining:
        return Pipelining(self.schedule, self.num_stages, self.num_microbatches, self.virtual_stages)

    @property
    def kind(self) -> str:
        """What people call it."""
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
        zero = f", zero {self.zero}{', offloaded' if self.offload else ''}" if self.zero else ""
        return f"pp={self.num_stages} on {self.mesh}, {self.num_microbatches} microbatches{zero}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A complete plan of a configuration.

    estimate_s: of a step, in the closed form of the schedule. hopeless: that is all that anybody will want to know.
    """

    configuration: Configuration
    pricing: Pricing
    leaders: tuple[Assignment, ...]
    priced: Priced
    stages: tuple[Stage, ...]
    estimate_s: float = 0.0
    hopeless: bool = False

    @cached_property
    def predicted(self) -> Predicted:
        return predict(self.pricing, self.leaders, self.priced, self.stages, self.configuration.pipelining)

    @property
    def step_time_s(self) -> float:
        return self.estimate_s if self.hopeless else self.predicted.step_time_s

    @property
    def is_rematerialised(self) -> bool:
        return any(stage.strongest for stage in self.stages)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inner:
    """The answer to the inner problem under some weights.

    objective: its value, seconds a step on one stage mesh. shared_once: see ``evaluate``. given: ``priced``, if it is
    known.
    """

    pricing: Pricing
    leaders: tuple[Assignment, ...]
    objective: float
    shared_once: bool
    given: Priced | None = None
    _costs: dict[int, tuple[BlockCost, ...]] = field(default_factory=dict)
    _fastest: dict[int, float] = field(default_factory=dict)

    @cached_property
    def priced(self) -> Priced:
        """Block by block; answers that only serve as bounds never need it."""
        return self.given or evaluate(self.pricing, self.leaders, shared_once=self.shared_once)

    def costs(self, num_ranks: int) -> tuple[BlockCost, ...]:
        """What the blocks cost a pipeline of so many ranks."""
        if num_ranks not in self._costs:
            self._costs[num_ranks] = self.priced.block_costs(self.pricing, num_ranks)
        return self._costs[num_ranks]

    def fastest_s(self, num_ranks: int) -> float:
        """Seconds of a microbatch in all blocks, at the levels that take least."""
        if num_ranks not in self._fastest:
            self._fastest[num_ranks] = sum(min(block.time_s) for block in self.costs(num_ranks))
        return self._fastest[num_ranks]
