"""Lower bounds on the seconds of a step, for all plans of a partial configuration; ``best_first`` proves them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from autopar.ir.offload import Offload
from autopar.search.outer.configuration import Configuration
from autopar.search.outer.configuration_solver import Solver
from autopar.search.problem.constraints import Constraints

# Bubble of the best schedule there usually is, in units of that of 1F1B: zero-bubble schedules, ZB-H1
# (arXiv:2401.10241), have a third of it. It orders the search and prunes by estimate; no proved bound rests on it.
# Halved: same plans, work within 1 %; doubled: same plans, work 0 and −9 % (docs/decisions/0021).
LIKELY_BUBBLE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds on the plans under ``constraints``. offload: where tensors that ZeRO shards are."""

    solver: Solver
    constraints: Constraints
    offload: Offload = Offload.NONE
    _known: dict[tuple[int, int, bool], float] = field(default_factory=dict)

    def ideal_s(self, num_stages: int, num_microbatches: int, *, on_host: bool = False) -> float:
        """Lower bound on a partial configuration: seconds of a step of perfectly divided ops, with bubble and
        recomputation. on_host: without recomputation, since activations may wait in host memory instead."""
        key = (num_stages, num_microbatches, on_host)
        if key not in self._known:
            ideal, ranks = self.solver.prices.ideal, self.solver.cluster.num_gpus // num_stages
            parts = self.solver.batches * num_microbatches
            pass_s = ideal.microbatch_s(ranks, parts)
            passes = num_microbatches + self.bubble * (num_stages - 1)
            recomputed = num_microbatches * self._recomputed_s(ranks, num_stages, num_microbatches)
            if on_host and recomputed < inf:
                recomputed = 0.0
            busy = (pass_s * passes + recomputed) / num_stages
            if self.may_be_naive(num_stages):
                busy = min(busy, num_microbatches * pass_s)
            self._known[key] = max(busy, ideal.path_s(ranks, parts))
        return self._known[key]

    def estimate_s(self, num_stages: int, num_microbatches: int) -> float:
        """``ideal_s`` with the bubble that the best of the schedules is likely to have."""
        ideal_s = self.ideal_s(num_stages, num_microbatches)
        if self.bubble or num_stages == 1:
            return ideal_s
        bubble = LIKELY_BUBBLE * (num_stages - 1) / num_stages
        ranks = self.solver.cluster.num_gpus // num_stages
        return ideal_s + bubble * self.solver.prices.ideal.microbatch_s(ranks, self.solver.batches * num_microbatches)

    def _recomputed_s(self, ranks: int, num_stages: int, num_microbatches: int) -> float:
        """Least seconds of recomputation of a microbatch, in all stages, that a rank's memory demands."""
        if len(self.solver.levels) == 1:
            return 0.0
        live, room = self.solver.room(num_stages, num_microbatches, self.constraints)
        state = 0.0 if self.offload else self.solver.least_state_bytes * num_stages
        parts = self.solver.batches * num_microbatches
        return self.solver.prices.ideal.recomputed_s(ranks, parts, (room - state) / live)

    def may_be_naive(self, num_stages: int) -> bool:
        """Whether the schedule may be naive: one microbatch at a time, all other ranks idle."""
        return num_stages > 1 and self.constraints.schedule in (None, "naive")

    @property
    def bubble(self) -> int:
        """1 where the schedule is sure to have a bubble of P - 1 passes, 0 where it may be filled."""
        return int(self.constraints.schedule in ("naive", "gpipe", "1f1b"))

    def pipelined(self, stage_s: float, configuration: Configuration) -> float:
        """Lower bound on the seconds of a step whose ops and gradient reductions take ``stage_s`` seconds in all on one
        stage mesh."""
        stages, num = configuration.num_stages, configuration.num_microbatches
        pass_s = self.solver.prices.ideal.microbatch_s(configuration.mesh.size, self.solver.batches * num)
        bubble = pass_s * (stages - 1) / stages
        return max(stage_s / stages + self.bubble * bubble, self.ideal_s(stages, num))
