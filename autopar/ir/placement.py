"""Placements of a tensor on a mesh, spelt as in PyTorch.

A ``Layout`` has one placement per mesh axis. Where several axes shard one tensor dimension, the
earlier axis is the major one: ``(Shard(0), Shard(0))`` on ``(2, 4)`` gives rank ``(i, j)`` piece
``4 * i + j`` of eight. Pieces are equal; a dimension that does not divide is never sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.ir.mesh import Mesh

Layout = tuple[Placement, ...]

__all__ = [
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "divides",
    "dual",
    "local_shape",
    "replicated",
]


def replicated(mesh: Mesh) -> Layout:
    """The layout that keeps a whole copy on every rank of ``mesh``."""
    return (Replicate(),) * len(mesh)


def dual(placement: Placement) -> Placement:
    """Placement that the gradient of a tensor *produced* with ``placement`` has to arrive in.

    A partial result is a sum of the ranks' parts, so each part's gradient is the whole gradient.
    """
    return Replicate() if placement.is_partial() else placement


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Shape that one rank holds of a tensor of global ``shape``."""
    local = list(shape)
    for placement, axis in zip(layout, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] //= axis.size
    return tuple(local)


def divides(shape: Sequence[int], layout: Layout, mesh: Mesh) -> bool:
    """Whether ``layout`` cuts ``shape`` into equal pieces."""
    left = list(shape)
    for placement, axis in zip(layout, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            if left[placement.dim] % axis.size:
                return False
            left[placement.dim] //= axis.size
    return True
