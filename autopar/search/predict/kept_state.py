"""Bytes that outlive a step: parameters and optimiser state, which checkpoints and copies on other hosts hold."""

from __future__ import annotations

from collections.abc import Sequence

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


def model_state_bytes(workload: Workload) -> float:
    """Of the whole model, each tensor once, as in a checkpoint."""
    return float(
        sum(
            len(group.names) * group.numel * group.itemsize * (_TENSORS if group.requires_grad else 1)
            for group in workload.parameters
        )
    )
