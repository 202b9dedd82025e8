"""Pipelines: the stages of this rank, run by torch.distributed.pipelining in the order of ``autopar.ir.schedule``.

One path for all schedules: our order of passes, lowered to sends and receives by torch, executed by its runtime.
Every stage gets the step inputs as keywords and takes those it needs; tensors from the stage before come as
positional arguments. The loss is computed inside the last stage. Shapes are known from the program, so no metadata
travels. Tensors that stages exchange live no longer than the microbatch needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.pairs import paired
from autopar.ir.program import TensorSpec
from autopar.ir.schedule import Action as OurAction
from autopar.ir.schedule import Pipelining
from autopar.runtime.host_passes import HostPasses
from autopar.runtime.local_stage import LocalStage
from autopar.runtime.randomness import Randomness
from autopar.runtime.split_backward import WeightPass, backward_to_inputs
from autopar.runtime.torch_private import is_view
from autopar.runtime.torch_private_pipelining import Action, Kind, Schedule, Stage, pair, with_communication
from autopar.runtime.two_queues import BackwardThread

# Keeps the step inputs, which have the model's names, apart from the keywords of the schedule.
_PREFIX = "input_"


class _Stage(Stage):
    """A stage that tells the gradient engines before each backward whether it is the last one.

    The base class would let FSDP reduce everything after the last backward; told in time, it overlaps.
    """

    def __init__(
        self,
        stage: LocalStage,
        device: torch.device,
        group: dist.ProcessGroup,
        random: Randomness,
        passes: HostPasses,
    ) -> None:
        program = stage.program
        outputs = (torch.empty((), device="meta"),) if program.loss is not None else _on_meta(program.sent)
        super().__init__(
            stage.module,
            program.stage,
            program.num_stages,
            device,
            input_args=_on_meta(program.received),
            output_args=outputs,
            group=group,
        )
        self._stage, self._random, self._passes = stage, random, passes
        self._inputs = {_PREFIX + name: name for name in program.given}
        self._sending: dict[int, list[dist.Work]] = {}
        self._returning: list[dist.Work] = []

    # Passes.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._stage.module.begin(fwd_chunk_id)
        self._passes.begin(OurAction(self.stage_index, "F", fwd_chunk_id))
        with self._random.of(self._stage.module, fwd_chunk_id):
            found = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._passes.end_forward(self.stage_index, fwd_chunk_id)
        return found

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.submod(*args, **{name: kwargs[given] for given, name in self._inputs.items()})
        # What is sent has to be contiguous; a transposed view is not.
        return tuple(output.contiguous() for output in outputs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # Its outputs have arrived, or their gradients could not have come back.
        for work in self._sending.pop(bwd_chunk_id, ()):
            work.wait()
        self._passes.begin(OurAction(self.stage_index, "B" if full_backward else "I", bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._end(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._passes.begin(OurAction(self.stage_index, "W", bwd_chunk_id))
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._end(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        if backward_type == "weight":
            weights: WeightPass = bwd_kwargs["param_groups"]
            self._stage.before_weights(last_backward)
            weights.run()
            self._stage.after_weights(last_backward)
            return (), None
        received = bwd_kwargs["input_values"][: len(self._stage.program.received)]
        outputs = bwd_kwargs["stage_output"]
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        grads = bwd_kwargs["output_grads"] or tuple(map(torch.ones_like, outputs))
        later = None
        if backward_type == "input":
            self._stage.before_inputs()
            later = backward_to_inputs(outputs, grads, received)
            # The weights' part starts further down; nothing else may keep the graph above it.
            bwd_kwargs["stage_output"] = bwd_kwargs["output_grads"] = ()
            for output in outputs:
                if not is_view(output):
                    output.detach_()
        else:
            self._stage.before_backward(last_backward)
            pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
            elif last_backward:
                self._stage.reshard()
        return tuple(map(_taken_gradient, received, self.wants_gradients())), later

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engines reduced during the last backward."""

    def _end(self, microbatch: int) -> None:
        """The microbatch has left this stage; so do the tensors that it received."""
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in infos.get(microbatch, ()):
                info.buffer = None
        self._passes.end_backward(self.stage_index, microbatch)

    # Tensors to and from other stages.

    def for_each_microbatch(self, infos: tuple[Any, ...], count: int) -> dict[int, tuple[Any, ...]]:
        """Memory comes when it is needed."""
        for info in infos:
            info.buffer = None
        return {number: tuple(map(copy, infos)) for number in range(count)}

    def wants_gradients(self) -> Sequence[bool]:
        return [spec.has_gradient for spec in self._stage.program.received]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id], self._stage.program.received, fwd_chunk_id)
        self.note_gradients(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        infos = self.grad_recv_info[bwd_chunk_id]
        wanted = [pair for pair in zip(infos, self._stage.program.sent, strict=True) if pair[1].has_gradient]
        self._allocate([info for info, _ in wanted], [spec for _, spec in wanted], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[Any], specs: Sequence[TensorSpec], microbatch: int) -> None:
        sizes = self._stage.module.sizes[microbatch]
        for info, spec in zip(infos, specs, strict=True):
            info.buffer = torch.empty(sizes.shape(spec.shape), dtype=spec.dtype, device=self.device)

    def send_forward(self, microbatch: int) -> None:
        self._sending[microbatch] = _start(self.get_fwd_send_ops(microbatch))

    def send_backward(self, microbatch: int) -> None:
        """One gradient at a time is under way: the stage before says nothing when it has got it."""
        self.finish_sending()
        self._returning = _start(self.get_bwd_send_ops(microbatch))

    def finish_sending(self) -> None:
        for work in self._returning:
            work.wait()
        self._returning = []


class Pipeline:
    """Runs training steps of the stages of this rank in step with the others."""

    def __init__(
        self,
        stages: Sequence[LocalStage],
        shape: Pipelining,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        randomness: Randomness,
        backwards: BackwardThread | None = None,
    ) -> None:
        """backwards: runs the backward of a pair while its forward runs, where pairs run at once."""
        passes_of_host = HostPasses(stages[0].module.host, shape.orders()[shape.rank_of(stages[0].program.stage)])
        self.stages = [_Stage(stage, device, group, randomness, passes_of_host) for stage in stages]
        count = shape.num_microbatches
        self._schedule = Schedule(  # type: ignore[no-untyped-call]  # torch does not annotate it
            list(self.stages), count, loss_fn=_given_loss, scale_grads=False
        )
        passes: dict[int, Any] = {
            rank: [
                pair(*map(_action, own)) if len(own) > 1 else _action(*own)
                for own in (paired(order) if backwards is not None else ((action,) for action in order))
            ]
            for rank, order in enumerate(shape.orders())
        }
        self._schedule.follow(with_communication(passes, shape.rank_of, shape.num_stages))
        # Parameters are gathered block by block in forward and backward, not stage by stage between actions.
        self._schedule.unsharded_stages.update(stage.program.stage for stage in stages)
        by_index = {stage.stage_index: stage for stage in self.stages}

        # Torch would keep every tensor that was sent until the end of the step.
        def send_forward(action: Any, _: Any) -> None:
            by_index[action.stage_index].send_forward(action.microbatch_index)

        def send_backward(action: Any, _: Any) -> None:
            by_index[action.stage_index].send_backward(action.microbatch_index)

        def run_pair(action: Any, context: Any) -> None:
            assert backwards is not None
            forward, backward = action.sub_actions
            with backwards.running(partial(self._schedule.run_backward, backward, context)):
                self._schedule.run_forward(forward, context)

        self._schedule.run_by(Kind.OVERLAP_F_B, run_pair)
        self._schedule.run_by(Kind.SEND_F, send_forward)
        self._schedule.run_by(Kind.SEND_B, send_backward)
        # The schedule wants a target to split, though the loss has it already.
        self._target = torch.empty(count) if any(stage.is_last for stage in self.stages) else None

    def without_vote(self) -> AbstractContextManager[None]:
        """Within, a step needs no other rank to agree on how shapes are learnt."""
        return self._schedule.without_vote()

    def step(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """One step over this rank's batch; the losses of the microbatches if the last stage is here, else none."""
        losses: list[torch.Tensor] = []
        named = [{_PREFIX + name: value for name, value in own.items()} for own in microbatches]
        with self._schedule.given(named):
            self._schedule.step(target=self._target, losses=losses, return_outputs=False)
        for stage in self.stages:
            stage.finish_sending()
        return losses


def _action(action: OurAction) -> Any:
    return Action.from_str(str(action))


def _start(sends: list[dist.P2POp]) -> list[dist.Work]:
    """There is nothing to send between stages that have nothing to do with each other, as two towers."""
    return dist.batch_isend_irecv(sends) if sends else []


def _given_loss(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return output[0]


def _taken_gradient(value: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """The gradient that arrived at a received tensor, to be sent on; zeros if none did, None if none is wanted."""
    if not wanted:
        return None
    gradient, value.grad = value.grad, None
    return torch.zeros_like(value) if gradient is None else gradient.contiguous()


def _on_meta(specs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.has_gradient) for spec in specs
    )
