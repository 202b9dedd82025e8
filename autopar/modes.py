"""The programs of a model in train and in eval mode, with all of its arguments or fewer, under one plan.

The plan is made for the model in train mode, whose capture is there from the start. Eval mode, and calls without some
of the arguments (labels), are captured the first time that they are needed, of a copy of the module tree without
parameters, since the model itself may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.capture.capture import capture
from autopar.ir.capture.fake_twins import without_parameters
from autopar.ir.errors import InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import PlacedModel, place_like
from autopar.ir.program import StageProgram
from autopar.ir.torch_private import pytree
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from autopar.runtime.variants import Results

_WHOLE = True, frozenset[str]()


@dataclass(slots=True)
class Modes:
    """model: its module tree. example_inputs, example_target: on the meta device.

    placed: by mode, True for train, and the keys of the step inputs that are absent.
    """

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    example_target: Any
    placed: dict[tuple[bool, frozenset[str]], PlacedModel] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Any,
        loss_fn: Callable[..., Any] | None,
        example_target: Any,
        placed: PlacedModel,
    ) -> Modes:
        """placed: the model in train mode. The other arguments are those of ``capture``."""
        inputs, target = pytree.tree_map_only(torch.Tensor, _on_meta, (example_inputs, example_target))
        own_model, own_loss_fn = without_parameters(model, loss_fn)
        return cls(own_model, inputs, own_loss_fn, target, {_WHOLE: placed})

    def programs(
        self, results: Results, training: bool, absent: frozenset[str] = frozenset()
    ) -> tuple[CapturedModel, tuple[StageProgram, ...]]:
        """The capture in a mode, and its programs of all stages. absent: keys of step inputs that are not given.

        Raises CaptureError, PlanMismatch, or InvalidInput where arguments cannot be left out.
        """
        trained = self.placed[_WHOLE]
        if (training, absent) not in self.placed:
            found = capture(
                self.model,
                _without(self.example_inputs, absent),
                loss_fn=self.loss_fn,
                example_target=self.example_target,
                name=trained.captured.name,
                training=training,
            )
            # No tokens are dropped when a model is evaluated.
            capacity = trained.plan.expert_capacity if training else None
            analysis = Analysis.of(normalise(found, check=False), capacity)
            self.placed[training, absent] = place_like(analysis, trained)
        placed = self.placed[training, absent]
        programs = partition(placed, outputs=results)
        verify_placements(placed.captured, programs, placed.plan)
        return placed.captured, programs


def _without(inputs: Any, absent: frozenset[str]) -> Any:
    """Example inputs without the arguments at the keys ``absent``: of positional ones, the last."""
    left = inputs
    if isinstance(inputs, Mapping):
        left = {name: value for name, value in inputs.items() if f"kwargs[{name!r}]" not in absent}
    elif isinstance(inputs, (tuple, list)):
        count = next((n for n in range(len(inputs)) if f"args[{n}]" in absent), len(inputs))
        left = inputs[:count]
    size = 1 if isinstance(left, torch.Tensor) else len(left)
    if (1 if isinstance(inputs, torch.Tensor) else len(inputs)) - size != len(absent) or not size:
        raise InvalidInput(
            f"{', '.join(sorted(absent))}: not given, and only whole arguments can be left out, of positional ones the "
            "last, and never all.\n  try: example inputs by name, as parallelize(..., example_inputs={...}) takes them"
        )
    return left


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
