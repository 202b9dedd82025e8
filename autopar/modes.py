"""The programs of a model in train and in eval mode, under one plan.

The plan is made for the model in train mode, whose capture is there from the start. Eval mode is captured the first
time that it is needed, of a copy of the module tree without parameters, since the model itself may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram
from autopar.ir.standins import without_parameters
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.runtime.variants import Results


@dataclass(slots=True)
class Modes:
    """model: its module tree. example_inputs, example_target: on the meta device. captured: by mode, True for train."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    example_target: Any
    plan: Plan
    captured: dict[bool, CapturedModel] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Any,
        loss_fn: Callable[..., Any] | None,
        example_target: Any,
        captured: CapturedModel,
        plan: Plan,
    ) -> Modes:
        """captured: the model in train mode. The other arguments are those of ``capture``."""
        inputs, target = pytree.tree_map_only(torch.Tensor, _on_meta, (example_inputs, example_target))
        return cls(without_parameters(model), inputs, loss_fn, target, plan, {True: captured})

    def programs(self, results: Results, training: bool) -> tuple[CapturedModel, tuple[StageProgram, ...]]:
        """The capture in a mode, and its programs of all stages. Raises CaptureError or PlanMismatch."""
        if training not in self.captured:
            found = capture(
                self.model,
                self.example_inputs,
                loss_fn=self.loss_fn,
                example_target=self.example_target,
                name=self.captured[True].name,
                training=training,
            )
            self.captured[training] = normalise(found, check=False)
        captured = self.captured[training]
        like = None if training else self.captured[True]
        return captured, partition(captured, self.plan, outputs=results, like=like)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
