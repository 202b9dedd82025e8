"""The model's outputs of a plain forward: microbatches joined, gradients scaled, non-tensors put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

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
    """The results themselves. Their backward calls ``begin`` first, and multiplies each gradient by its scale."""
    outputs: tuple[torch.Tensor, ...] = _ScaledOutputs.apply(  # type: ignore[no-untyped-call]
        begin, tuple(scales), *results
    )
    return list(outputs)


class _ScaledOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, begin: Callable[[], None], scales: tuple[float, ...], *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.begin, ctx.scales = begin, scales
        ctx.set_materialize_grads(False)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.begin()
        scaled = [
            gradient if gradient is None or scale == 1.0 else gradient * scale
            for gradient, scale in zip(gradients, ctx.scales, strict=True)
        ]
        return None, None, *scaled
