"""Bytes that outlive a step: parameters and optimiser state, which checkpoints and copies on other hosts hold."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.offload import Offload
from autopar.search.pricing.block_prices import Priced
from autopar.search.problem.workload import Workload
from autopar.search.stages.stage import Stage

# A parameter that trains, and AdamW's two moments of it.
_TENSORS = 3


def rank_state_bytes(priced: Priced, held: Sequence[Sequence[Stage]]) -> float:
    """Of the fullest rank, on the device or offloaded. held: stages of each place in the pipeline."""
    return max(
        sum(
            price.itemsize
            * price.numel
            / (price.shards if price.zero else 1)
            * (_TENSORS if price.requires_grad else 1)
            for stage in own
            for block in range(stage.first, stage.last + 1)
            for price in priced.held.get(block, ())
        )
        for own in held
    )


def offloaded_bytes(priced: Priced, held: Sequence[Sequence[Stage]]) -> tuple[float, float]:
    """In host memory and on disk, of the rank with most there, gradients included. held: as above."""
    host = disk = 0.0
    for own in held:
        found = dict.fromkeys(Offload, 0.0)
        for stage in own:
            for block in range(stage.first, stage.last + 1):
                for price in priced.held.get(block, ()):
                    if price.zero_axes:
                        kept = price.itemsize * price.numel / price.shards
                        found[stage.place(block)] += kept * (_TENSORS + 1 if price.requires_grad else 1)
        host, disk = max(host, found[Offload.HOST]), max(disk, found[Offload.DISK])
    return host, disk


def model_state_bytes(workload: Workload) -> float:
    """Of the whole model, each tensor once, as in a checkpoint."""
    return float(
        sum(
            len(group.names) * group.numel * group.itemsize * (_TENSORS if group.requires_grad else 1)
            for group in workload.parameters
        )
    )
