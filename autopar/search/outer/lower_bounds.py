"""Lower bounds on the seconds of a step, for all plans of a pace; ``best_first`` says what they rest on."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.search.outer.configuration import Configuration
from autopar.search.outer.configuration_solver import Solver
from autopar.search.problem.constraints import Constraints

# Passes of a stage that are waited for on the way through the others, under the best schedule there is as a rule: that
# of zero-bubble schedules, ZB-H1 (arXiv:2401.10241), whose bubble is a third of that of 1F1B. It orders the search and
# says what is unlikely to be better; what is proved does not rest on it. Halved: same plans, work within 1 %; doubled:
# same plans, work 0 and −9 % (docs/decisions/0021).
LIKELY_BUBBLE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the plans under ``constraints``. offload: whether what ZeRO shards is in host memory."""

    solver: Solver
    constraints: Constraints
    offload: bool = False
    _floors: dict[tuple[int, int], float] = field(default_factory=dict)

    def floor(self, num_stages: int, num_microbatches: int) -> float:
        """Seconds of a step in which everything is perfectly divided, with the bubble and rematerialisation."""
        key = (num_stages, num_microbatches)
        if key not in self._floors:
            floor, ranks = self.solver.floor, self.solver.cluster.num_gpus // num_stages
            once = floor.microbatch_s(ranks, num_microbatches)
            passes = num_microbatches + self.bubble * (num_stages - 1)
            again = num_microbatches * self._again_s(ranks, num_stages, num_microbatches)
            busy = (once * passes + again) / num_stages
            if self.may_be_naive(num_stages):
                busy = min(busy, num_microbatches * once)
            self._floors[key] = max(busy, floor.path_s(ranks, num_microbatches))
        return self._floors[key]

    def hope(self, num_stages: int, num_microbatches: int) -> float:
        """The same with the bubble that the best of the schedules is likely to have."""
        floor = self.floor(num_stages, num_microbatches)
        if self.bubble or num_stages == 1:
            return floor
        waited = LIKELY_BUBBLE * (num_stages - 1) / num_stages
        ranks = self.solver.cluster.num_gpus // num_stages
        return floor + waited * self.solver.floor.microbatch_s(ranks, num_microbatches)

    def _again_s(self, ranks: int, num_stages: int, num_microbatches: int) -> float:
        """Seconds that a microbatch runs again at least, in all stages, for a rank's memory."""
        if len(self.solver.levels) == 1:
            return 0.0
        live, room = self.solver.room(num_stages, num_microbatches, self.constraints)
        state = 0.0 if self.offload else self.solver.least_state_bytes * num_stages
        return self.solver.floor.again_s(ranks, num_microbatches, (room - state) / live)

    def may_be_naive(self, num_stages: int) -> bool:
        """Whether a rank may have a single microbatch, and nothing to do while others have it."""
        return num_stages > 1 and self.constraints.schedule in (None, "naive")

    @property
    def bubble(self) -> int:
        """What is sure to be waited for: P - 1 passes under plain schedules, nothing under others."""
        return int(self.constraints.schedule in ("naive", "gpipe", "1f1b"))

    def pipelined(self, stage_s: float, configuration: Configuration) -> float:
        """Bound on a step whose ops take ``stage_s`` seconds in all on one stage mesh, sums of gradients included."""
        stages, num = configuration.num_stages, configuration.num_microbatches
        bubble = self.solver.floor.microbatch_s(configuration.mesh.size, num) * (stages - 1) / stages
        return max(stage_s / stages + self.bubble * bubble, self.floor(stages, num))
