"""The loss of the global batch, of what ranks have of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.runtime.mesh import JobMesh


def start_sum(loss: torch.Tensor, partial_axes: tuple[int, ...], mesh: JobMesh) -> dist.Work | None:
    """Start the sum, in place, of a loss over the axes on which it is partial; None if there are none."""
    group = mesh.group(partial_axes)
    return None if group is None else dist.all_reduce(loss, group=group, async_op=True)


def loss_of_pipeline(
    losses: Sequence[torch.Tensor], partial_axes: tuple[int, ...], mesh: JobMesh, device: torch.device
) -> torch.Tensor:
    """The same number on every rank of every stage. losses: of this rank's microbatches, none before the last stage.

    Each summand is counted by one rank of the last stage.
    """
    whole = [axis for axis in range(len(mesh.coordinates)) if axis not in partial_axes]
    if losses and mesh.first_on(whole):
        total = torch.stack([loss.detach() for loss in losses]).sum().float()
    else:
        total = torch.zeros((), device=device)
    dist.all_reduce(total)
    return total
