"""The programs of a model in train and in eval mode, with all of its arguments or fewer, at any size, under one plan.

The plan is made for the model in train mode, whose capture is there from the start. Eval mode, and calls without some
of the arguments (labels), are captured the first time that they are needed, of a copy of the module tree without
parameters, since the model itself may be gone by then. For calls of another batch or length the model is captured once
more, with symbols for them; where it has none, at every size that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.any_size import any_size_programs
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.capture.capture import capture
from autopar.ir.capture.example_inputs import at_sizes
from autopar.ir.capture.fake_twins import without_parameters
from autopar.ir.capture.flat_call import Call
from autopar.ir.capture.other_sizes import captured_at, holds_at, sizes_of_inputs
from autopar.ir.capture.symbols import named_dims
from autopar.ir.errors import CaptureError, InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import PlacedModel, place_like
from autopar.ir.placed.uneven import uneven_obstacle
from autopar.ir.program import StageProgram
from autopar.ir.torch_private import pytree
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from autopar.runtime.call_sizes import Sizes
from autopar.runtime.variants import Results

# Train mode with all arguments, for which plans are made, and at the plan's sizes.
_WHOLE = True, frozenset[str]()
_PLANNED: tuple[bool, frozenset[str], Sizes] = (*_WHOLE, ())


@dataclass(slots=True)
class Modes:
    """model: its module tree. example_inputs, example_target: on the meta device.

    placed: by mode, True for train, the keys of the step inputs that are absent, and sizes other than the plan's.
    symbolic: captures with symbols, by mode and absent step inputs. uneven: why microbatches cannot differ, by these
    and the symbols in which they do.
    """

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    example_target: Any
    placed: dict[tuple[bool, frozenset[str], Sizes], PlacedModel] = field(default_factory=dict)
    symbolic: dict[tuple[bool, frozenset[str]], CapturedModel] = field(default_factory=dict)
    uneven: dict[tuple[bool, frozenset[str], frozenset[str]], str | None] = field(default_factory=dict)

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
        return cls(own_model, inputs, own_loss_fn, target, {_PLANNED: placed})

    def programs(
        self, results: Results, training: bool, absent: frozenset[str] = frozenset(), sizes: Sizes = ()
    ) -> tuple[CapturedModel, tuple[StageProgram, ...]]:
        """The capture in a mode, and its programs of all stages. absent: keys of step inputs that are not given.
        sizes: of the global batch and of lengths, where they are not the plan's; where the capture has symbols for
        them, the programs are for all sizes that divide alike.

        Raises CaptureError, PlanMismatch, or InvalidInput where arguments cannot be left out.
        """
        if sizes:
            sizes = self._changed(sizes)
            symbolic = self._symbolic(training, absent)
            if symbolic.symbols.keys() >= dict(sizes).keys():
                like = self._placed(training, absent, ())
                capacity = like.plan.expert_capacity if training else None
                found = any_size_programs(symbolic, like, results, dict(sizes), capacity)
                if found is not None:
                    return found
        placed = self._placed(training, absent, sizes)
        programs = partition(placed, outputs=results)
        verify_placements(placed.captured, programs, placed.plan)
        return placed.captured, programs

    def uneven_obstacle(self, training: bool, absent: frozenset[str], varying: frozenset[str]) -> str | None:
        """Why microbatches, on one rank or on several, may not differ in the symbols ``varying``; None if they may."""
        key = training, absent, varying
        if key not in self.uneven:
            placed = self._placed(training, absent, ())
            self.uneven[key] = uneven_obstacle(placed, self._symbolic(training, absent), varying)
        return self.uneven[key]

    def _changed(self, sizes: Sizes) -> Sizes:
        """Those that are not the plan's."""
        given = Call.of(self.model, self.example_inputs, self.loss_fn, self.example_target).tensors
        planned = {name: t.shape[dim] for t, dims in zip(given, named_dims(given)) for dim, name in dims.items()}
        return tuple((name, size) for name, size in sizes if planned.get(name) != size)

    def _symbolic(self, training: bool, absent: frozenset[str]) -> CapturedModel:
        """The capture in a mode, with symbols, in normal form; without any where it holds for its own sizes alone."""
        if (training, absent) not in self.symbolic:
            found = self._capture(training, absent, (), symbolic=True)
            # All sizes are others in a capture to compare with, so that a number that came of one shows.
            other = {name: size - 1 if size > 2 else size + 1 for name, size in sizes_of_inputs(found).items()}
            holds = False
            with suppress(CaptureError):  # the model may not run at those
                holds = holds_at(found, other, self._capture(training, absent, tuple(other.items())))
            if not holds:
                found = replace(found, symbols={})
            self.symbolic[training, absent] = found
        return self.symbolic[training, absent]

    def _placed(self, training: bool, absent: frozenset[str], sizes: Sizes) -> PlacedModel:
        key = training, absent, sizes
        if key not in self.placed:
            # Of a mode as in train mode at the same sizes, which is as the plan has it.
            like = self.placed[_PLANNED] if (training, absent) == _WHOLE else self._placed(*_WHOLE, sizes)
            # No tokens are dropped when a model is evaluated.
            capacity = like.plan.expert_capacity if training else None
            captured = self._captured(training, absent, sizes)
            self.placed[key] = place_like(Analysis.of(captured, capacity, like.analysis.recipes), like)
        return self.placed[key]

    def _captured(self, training: bool, absent: frozenset[str], sizes: Sizes) -> CapturedModel:
        """In normal form."""
        if sizes:
            with suppress(CaptureError):
                return captured_at(self._symbolic(training, absent), dict(sizes))
        return self._capture(training, absent, sizes)

    def _capture(
        self, training: bool, absent: frozenset[str], sizes: Sizes, *, symbolic: bool = False
    ) -> CapturedModel:
        inputs, target = self._resized(dict(sizes))
        model = self.placed[_PLANNED].captured
        found = capture(
            self.model,
            _without(inputs, absent),
            loss_fn=self.loss_fn,
            example_target=target,
            name=model.name,
            training=training,
            symbolic=symbolic,
        )
        # It is that model, though with symbols it may be spelled otherwise.
        return normalise(replace(found, fingerprint=model.fingerprint), check=False)

    def _resized(self, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        """The example inputs and target at other sizes."""
        if not sizes:
            return self.example_inputs, self.example_target
        return at_sizes(self.model, self.example_inputs, self.loss_fn, self.example_target, sizes)


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
