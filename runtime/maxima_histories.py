"""Histories of the largest magnitudes in delayed scaling: kept by every rank of a stage, alike, and rolled once a step.

products of a step   ── note ──>   largest so far, on each rank   ── all_reduce, after the last backward ──>   history
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autopar.ir.ops.maxima_history import roll, running_of, shape_of_history
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.program import StageProgram
from autopar.runtime.mesh import JobMesh


class MaximaHistories:
    """Those of the stages of one rank, by name."""

    def __init__(self, programs: Sequence[StageProgram], mesh: JobMesh, device: torch.device) -> None:
        """programs: of this rank's stages."""
        shape = shape_of_history(SCALINGS["fp8-delayed"])
        self._of_stage = [
            {name: torch.zeros(shape, device=device) for name in program.histories} for program in programs
        ]
        self._group = mesh.group(range(len(mesh.stage_mesh))) if any(self._of_stage) else None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All of them."""
        return {name: history for own in self._of_stage for name, history in own.items()}

    def finish(self) -> None:
        """The last backward of a step has run. All ranks of the stages together."""
        for own in self._of_stage:
            if not own:
                continue
            largest = torch.stack([running_of(history) for history in own.values()])
            if self._group is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
            for history, found in zip(own.values(), largest, strict=True):
                roll(history, found)
