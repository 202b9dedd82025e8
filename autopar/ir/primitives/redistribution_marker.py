"""A redistribution before it is lowered: a change of layout in a program that still has global shapes."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.redistribution import Collective, Step


def redistribution(
    x: torch.Tensor,
    *,
    axis: str,
    forward: str,
    backward: str,
    gather_dim: int | None = None,
    shard_dim: int | None = None,
) -> torch.Tensor:
    """``x`` in the layout after one step along mesh axis ``axis``. The global tensor is the same.

    forward, backward: names of collectives. gather_dim, shard_dim: dimension that the axis shards before and after.
    """
    return x


def keywords_of(step: Step, mesh: Mesh) -> dict[str, Any]:
    """Keywords of ``redistribution`` for ``step`` on ``mesh``."""
    found: dict[str, Any] = {
        "axis": mesh.names[step.axis],
        "forward": step.forward.value,
        "backward": step.backward.value,
    }
    if step.gather_dim is not None:
        found["gather_dim"] = step.gather_dim
    if step.shard_dim is not None:
        found["shard_dim"] = step.shard_dim
    return found


def step_of(
    mesh: Mesh, *, axis: str, forward: str, backward: str, gather_dim: int | None = None, shard_dim: int | None = None
) -> Step:
    """The step that a call of ``redistribution`` stands for."""
    return Step(mesh.index(axis), Collective(forward), Collective(backward), gather_dim, shard_dim)
