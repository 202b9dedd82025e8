"""The least that the ops of a model can take: every op perfectly divided over the ranks of a stage.

For one microbatch of M on n ranks, with the roofline of ``cost_model.ops`` (a shard is never less than an n-th):

    sum over ops   max( FLOPs / (n M peak),  (batch bytes / M + other bytes) / (n bandwidth) )  +  launches

forward and backward alike. Launches are what makes many small microbatches slow on small models. A microbatch on its
way through all stages and back waits for what no schedule can put off: everything but the gradients of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.cost_model.ops import OpCost
from autopar.search.instance import Floats
from autopar.search.pricing import OpPrices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floor:
    """Per op and direction: seconds of all samples on one device, by what bounds them, and of launches.

    on_path: the share that a microbatch waits for.
    """

    flops_s: Floats
    flops_batch: Floats
    batch_bytes_s: Floats
    other_bytes_s: Floats
    launch_s: Floats
    on_path: Floats

    @classmethod
    def of(cls, ops: OpPrices) -> Floor:
        rows: list[tuple[float, ...]] = []
        load = ops.workload
        for node, repeats in load.repeats.items():
            if node not in load.folding.block_of:
                continue
            cost = ops.cost(node)
            if not cost.free:
                rows.append((*_row(cost, cost.flops, False, 1, repeats), 1.0))
            if not cost.free_backward:
                row = _row(cost, cost.backward_flops, True, cost.backward_launches, repeats)
                rows.append((*row, 1.0 - load.weights_share(node)))
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 6)
        return cls(
            flops_s=table[:, 0],
            flops_batch=table[:, 1],
            batch_bytes_s=table[:, 2],
            other_bytes_s=table[:, 3],
            launch_s=table[:, 4],
            on_path=table[:, 5],
        )

    def microbatch_s(self, num_ranks: int, num_microbatches: int) -> float:
        """Least seconds that all blocks together take for one microbatch on a stage mesh of ``num_ranks``."""
        return float(self._seconds(num_ranks, num_microbatches).sum())

    def path_s(self, num_ranks: int, num_microbatches: int) -> float:
        """Least seconds from the start of a microbatch's forward to the end of its backward, under any schedule."""
        return float(self._seconds(num_ranks, num_microbatches) @ self.on_path)

    def _seconds(self, num_ranks: int, num_microbatches: int) -> Floats:
        flops = self.flops_s / np.where(self.flops_batch > 0, num_microbatches, 1)
        moved = self.batch_bytes_s / num_microbatches + self.other_bytes_s
        seconds: Floats = np.maximum(flops, moved) / num_ranks + self.launch_s
        return seconds


def _row(cost: OpCost, flops: float, backward: bool, launches: int, repeats: int) -> tuple[float, ...]:
    tensors = (*cost.backward_read, *cost.backward_written) if backward else (*cost.read, *cost.written)
    seconds = cost.device.memory_seconds
    return (
        repeats * flops / (cost.rate.peak_flops * cost.efficiency),
        float(cost.carries_batch),
        repeats * seconds(sum(t.num_bytes for t in tensors if t.carries_batch)),
        repeats * seconds(sum(t.num_bytes for t in tensors if not t.carries_batch)),
        repeats * launches * cost.device.kernel_launch_s,
    )
