"""The model's outputs of a plain forward: microbatches joined, gradients scaled, non-tensors put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd import Variable

from autopar.ir.graph import CapturedModel
from autopar.ir.placement import Shard
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram


@dataclass(frozen=True, slots=True)
class Outputs:
    """How the flat results of the stage become the flat outputs of the model.

    flat: position of each output in the results, or the constant that it is. batch_dims: of each result.
    gradient_scales: factor on the gradient of each result. Parameter gradients are sums over the data-parallel
    ranks; of a result that each rank has its own rows of, the user's loss is a mean over these rows, and the
    average is wanted, as from DistributedDataParallel.
    """

    flat: tuple[Any, ...]
    is_result: tuple[bool, ...]
    batch_dims: tuple[int | None, ...]
    gradient_scales: tuple[float, ...]

    @classmethod
    def of(cls, captured: CapturedModel, program: StageProgram, plan: Plan) -> Outputs:
        start = 1 if captured.has_loss else 0
        values = captured.output_args()[start : start + captured.num_outputs]
        flat: list[Any] = []
        dims: list[int | None] = []
        scales: list[float] = []
        for value in values:
            if not isinstance(value, fx.Node):
                flat.append(value)
                continue
            layout = program.output_layouts[len(dims)]
            assert layout is not None
            divided = [
                (axis, placement.dim)
                for axis, placement in zip(program.mesh.axes, layout, strict=True)
                if isinstance(placement, Shard) and axis.name in plan.inputs
            ]
            scale = 1.0
            for axis, _ in divided:
                scale /= axis.size
            flat.append(len(dims))
            scales.append(scale)
            dims.append(divided[0][1] if divided else _batch_dim(captured, value))
        is_result = tuple(isinstance(value, fx.Node) for value in values)
        return cls(tuple(flat), is_result, tuple(dims), tuple(scales))

    def merge(self, microbatches: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Results of the whole batch. Those without a batch dimension are averaged over the microbatches."""
        if len(microbatches) == 1:
            return list(microbatches[0])
        return [
            torch.stack(parts).mean(0) if dim is None else torch.cat(parts, dim)
            for parts, dim in zip(zip(*microbatches, strict=True), self.batch_dims, strict=True)
        ]

    def with_constants(self, results: Sequence[torch.Tensor]) -> list[Any]:
        """Flat outputs in the order of the model's output."""
        return [
            results[value] if is_result else value for value, is_result in zip(self.flat, self.is_result, strict=True)
        ]


def _batch_dim(captured: CapturedModel, node: fx.Node) -> int | None:
    """Dimension of the batch in an output that no mesh axis divides: the first one of the batch's size."""
    shape = node.meta["val"].shape
    return 0 if len(shape) and shape[0] == captured.batch_size else None


def scale_outputs(
    begin: Callable[[], None], scales: Sequence[float], results: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results themselves. Their backward multiplies each gradient by its scale; the first of them in a backward
    calls ``begin``.

    Each is apart in autograd: a backward from some of them gives no gradient, not even zeros, to parameters that only
    others depend on.
    """
    first = _FirstOfBackward(begin)
    return [
        _ScaledOutput.apply(first, scale, result)  # type: ignore[no-untyped-call]
        for scale, result in zip(scales, results, strict=True)
    ]


class _FirstOfBackward:
    """Calls ``begin`` once in each backward, however many outputs it starts from."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._has_begun = False

    def __call__(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            Variable._execution_engine.queue_callback(self._end)
            self._begin()

    def _end(self) -> None:
        self._has_begun = False


class _ScaledOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Callable[[], None], scale: float, result: torch.Tensor) -> torch.Tensor:
        ctx.first, ctx.scale = first, scale
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.first()
        return None, None, gradient if ctx.scale == 1.0 else gradient * ctx.scale
