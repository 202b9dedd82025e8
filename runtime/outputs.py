"""The model's outputs of a plain forward: microbatches joined, gradients scaled, non-tensors put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import CapturedModel
from autopar.ir.placement import Placement, Shard
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram, TensorSpec
from autopar.ir.program_sizes import SizeValues
from autopar.ir.torch_private import pytree
from autopar.runtime.torch_private import number_of_backward


@dataclass(frozen=True, slots=True)
class Outputs:
    """How the flat results of the stage become the flat outputs of the model.

    flat: position of each output in the results, or the constant that it is. microbatches: how each result is placed
    over the microbatches. specs: of each result in one microbatch.
    gradient_scales: factor on the gradient of each result. Parameter gradients are sums over the data-parallel
    ranks; of a result that each rank has its own rows of, the user's loss is a mean over these rows, and the
    average is wanted, as from DistributedDataParallel.
    """

    flat: tuple[Any, ...]
    is_result: tuple[bool, ...]
    microbatches: tuple[Placement, ...]
    specs: tuple[TensorSpec, ...]
    gradient_scales: tuple[float, ...]
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, captured: CapturedModel, program: StageProgram, plan: Plan) -> Outputs:
        """The outputs of a program."""
        start = 1 if captured.has_loss else 0
        values = captured.output_args()[start : start + captured.num_outputs]
        flat: list[Any] = []
        scales: list[float] = []
        for value in values:
            if not isinstance(value, fx.Node):
                flat.append(value)
                continue
            layout = program.output_layouts[len(scales)]
            assert layout is not None
            divided = [
                axis.size
                for axis, placement in zip(program.mesh.axes, layout, strict=True)
                if isinstance(placement, Shard) and axis.name in plan.inputs
            ]
            flat.append(len(scales))
            scales.append(1.0 / prod(divided))
        is_result = tuple(isinstance(value, fx.Node) for value in values)
        return cls(
            tuple(flat), is_result, program.output_microbatches, program.output_specs, tuple(scales), captured.out_spec
        )

    def merge(self, microbatches: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Results of the whole batch of this rank."""
        if len(microbatches) == 1:
            return list(microbatches[0])
        return [
            _joined(parts, placement)
            for parts, placement in zip(zip(*microbatches, strict=True), self.microbatches, strict=True)
        ]

    def blank(self, microbatches: Sequence[SizeValues], device: torch.device) -> list[torch.Tensor]:
        """Memory for the results of all microbatches, of these sizes."""
        found = []
        for spec, placement in zip(self.specs, self.microbatches, strict=True):
            shape, *others = (sizes.shape(spec.shape) for sizes in microbatches)
            if isinstance(placement, Shard):
                shape[placement.dim] += sum(other[placement.dim] for other in others)
            found.append(torch.empty(shape, dtype=spec.dtype, device=device))
        return found

    def as_returned(self, results: Sequence[torch.Tensor]) -> Any:
        """The outputs in the structure that the model returns."""
        leaves = [
            results[value] if is_result else value for value, is_result in zip(self.flat, self.is_result, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.tree)


def _joined(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    return torch.stack(list(parts)).sum(0) if placement.is_partial() else parts[0]


def scale_outputs(
    begins: Callable[[], None], scales: Sequence[float], results: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results themselves. Their backward multiplies each gradient by its scale, and calls ``begins`` before.

    Each is apart in autograd: a backward from some of them gives no gradient, not even zeros, to parameters that only
    others depend on.
    """
    return [
        _ScaledOutput.apply(begins, scale, result)  # type: ignore[no-untyped-call]
        for scale, result in zip(scales, results, strict=True)
    ]


class FirstOfBackward:
    """Calls something once in each backward, however many outputs of however many calls it starts from."""

    def __init__(self) -> None:
        self._begun = -1

    def __call__(self, begin: Callable[[], None]) -> None:
        """Call ``begin``, if nothing was called in this backward."""
        if self._begun != (number := number_of_backward()):
            self._begun = number
            begin()


class _ScaledOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begins: Callable[[], None], scale: float, result: torch.Tensor) -> torch.Tensor:
        ctx.begins, ctx.scale = begins, scale
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.begins()
        return None, None, gradient if ctx.scale == 1.0 else gradient * ctx.scale
