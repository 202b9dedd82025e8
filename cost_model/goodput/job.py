"""A job as far as failures concern it, and how it is protected against them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run.

    step_time_s: on all ranks. tokens_per_step: of all ranks. state_bytes: parameters and optimiser state that the
    fullest rank keeps between steps. checkpoint_bytes: of the whole model, each tensor once. data_parallel_size: groups
    of ranks that each have rows of their own and can train without the others; num_microbatches: of each of them.
    """

    step_time_s: float
    tokens_per_step: float
    num_gpus: int
    gpus_per_node: int
    state_bytes: float
    checkpoint_bytes: float
    data_parallel_size: int
    num_microbatches: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the job runs on."""
        return ceil(self.num_gpus / self.gpus_per_node)

    def level(self, missing_nodes: int) -> int:
        """Data-parallel groups that cannot run while so many nodes are missing."""
        missing = min(self.num_gpus, max(0, missing_nodes) * self.gpus_per_node)
        return ceil(missing * self.data_parallel_size / self.num_gpus)

    def speed(self, level: int) -> float:
        """Speed of training with ``level`` data-parallel groups fewer, as a share of that with all.

        The others take their microbatches, and the fullest of them decides: with M microbatches of each of d groups,
        M / ceil(M d / (d - level)). 0 where no group is left. The global batch stays as it is.
        """
        left = self.data_parallel_size - level
        if left < 1:
            return 0.0
        return self.num_microbatches / ceil(self.num_microbatches * self.data_parallel_size / left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a job is protected.

    checkpoint_steps: from one checkpoint on disk to the next. replica_steps: from one copy of each rank's state in the
    host memory of a partner on another node to the next; None without copies. spare_nodes: that take the place of
    lost ones. replans: whether the job trains on fewer ranks while nodes are missing; else it waits for repairs.
    partner_distance: nodes from a rank's node to that of its partner.
    """

    checkpoint_steps: int
    replica_steps: int | None = None
    spare_nodes: int = 0
    replans: bool = True
    partner_distance: int = 1

    def needs_disk(self, lost_nodes: int) -> bool:
        """Whether a failure that takes so many neighbouring nodes takes a rank and its partner, so that its state is on
        disk alone."""
        return self.replica_steps is None or lost_nodes > self.partner_distance
