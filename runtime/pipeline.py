"""Pipelines: the stage of this rank under a schedule of torch.distributed.pipelining.

Every stage gets the step inputs as keywords and takes those it needs; tensors from the stage before come as
positional arguments. The loss is computed inside the last stage. Shapes are known from the program, so no
metadata travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from autopar.ir.program import StageProgram, TensorSpec
from autopar.runtime.randomness import Randomness
from autopar.runtime.stage_module import StageModule

BeforeBackward = Callable[[bool], None]


# Keeps the step inputs, which have the model's names, apart from the keywords of the schedule.
_PREFIX = "input_"


class _Stage(PipelineStage):
    """A stage that tells the gradient engines before each backward whether it is the last one.

    The base class would let FSDP reduce everything after the last backward; told in time, it overlaps.
    """

    def __init__(
        self, *args: Any, live: int, before_backward: BeforeBackward, randomness: Randomness, **kwargs: Any
    ) -> None:
        """live: the most microbatches whose forward runs before their backward. Their buffers are reused."""
        super().__init__(*args, **kwargs)
        self._live = live
        self._before_backward = before_backward
        self._randomness = randomness

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], None]:
        assert backward_type == "full", backward_type
        self._before_backward(last_backward)
        grads = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return tuple(None if grad is None else grad.contiguous() for grad in grads), None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._randomness.of(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.submod(*args, **{name.removeprefix(_PREFIX): value for name, value in kwargs.items()})
        # What is sent has to be contiguous; a transposed view is not.
        return tuple(output.contiguous() for output in outputs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engines reduced during the last backward."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(min(self._live, num_microbatches), has_backward)
        for chunk in range(self._live, num_microbatches):
            self.args_recv_info[chunk] = self.args_recv_info[chunk % self._live]

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        # A gradient is used up by the backward before the next one is received.
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        for chunk in range(1, num_microbatches):
            self.grad_recv_info[chunk] = self.grad_recv_info[0]


class Pipeline:
    """Runs training steps of one stage in step with the others."""

    def __init__(
        self,
        module: StageModule,
        program: StageProgram,
        *,
        schedule: Literal["gpipe", "1f1b"],
        group: dist.ProcessGroup,
        device: torch.device,
        batch_dims: Mapping[str, int | None],
        before_backward: BeforeBackward,
        randomness: Randomness,
    ) -> None:
        """batch_dims: of each step input that this stage takes."""
        chunks = program.num_microbatches
        # Both run all forwards first when there are fewer microbatches than stages.
        one_forward_one_backward = schedule == "1f1b" and chunks >= program.num_stages
        outputs = (torch.empty((), device="meta"),) if program.loss is not None else _on_meta(program.sent)
        stage = _Stage(
            module,
            program.stage,
            program.num_stages,
            device,
            input_args=_on_meta(program.received),
            output_args=outputs,
            group=group,
            live=program.num_stages - program.stage if one_forward_one_backward else chunks,
            before_backward=before_backward,
            randomness=randomness,
        )
        specs: dict[str, Any] = {
            _PREFIX + name: _Replicate if dim is None else TensorChunkSpec(dim) for name, dim in batch_dims.items()
        }
        make = Schedule1F1B if one_forward_one_backward else ScheduleGPipe
        self._schedule = make(
            stage, chunks, loss_fn=_given_loss, kwargs_chunk_spec=specs if specs else None, scale_grads=False
        )
        # The schedule wants a target to split, though the loss has it already.
        self._target = torch.empty(chunks) if program.loss is not None else None

    def step(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """One step over this rank's batch; the losses of the microbatches on the last stage, else none."""
        losses: list[torch.Tensor] = []
        named: dict[str, Any] = {_PREFIX + name: value for name, value in inputs.items()}
        self._schedule.step(target=self._target, losses=losses, return_outputs=False, **named)
        return losses


def _given_loss(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return output[0]


def _on_meta(specs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=True) for spec in specs)
