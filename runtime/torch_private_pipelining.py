"""Private names of torch.distributed.pipelining, under plain names: a schedule that is given its passes.

The public schedules order their passes themselves. ``tests/runtime/test_torch_private.py`` has a case for each name.
Tried with torch 2.11.0, 2.13.0 and 2.14.1; pairs with 2.13.0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stages_of_torch
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

Action = _Action
"""A pass, a send or a receive: ``stage_index``, ``computation_type``, ``microbatch_index``; ``2F0`` as text."""

Kind = _ComputationType
"""What an action is: FORWARD, SEND_F, RECV_F and so on."""


def pair(forward: Action, backward: Action) -> Action:
    """One action of both, which begins when the inputs of both are there, and after which both send."""
    return Action(-1, Kind.OVERLAP_F_B, None, (forward, backward))


def with_communication(
    passes: Mapping[int, Sequence[Action]], rank_of: Callable[[int], int], num_stages: int
) -> dict[int, list[Action]]:
    """Passes by rank, with sends and receives between them in an order in which no two ranks wait for each other."""
    return dict(_add_send_recv({rank: list(own) for rank, own in passes.items()}, rank_of, num_stages))


# torch 2.11 sets up what is received together with what is sent.
_SETS_UP_TOGETHER = not hasattr(PipelineStage, "_setup_forward_recv_info")


class Stage(PipelineStage):
    """A stage that says what it will receive for each microbatch; the base class keeps memory for all of them."""

    def for_each_microbatch(self, infos: tuple[Any, ...], count: int) -> dict[int, tuple[Any, ...]]:
        """Metadata of the tensors that one microbatch receives, for each of ``count``."""
        raise NotImplementedError

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self.args_recv_info = self.for_each_microbatch(self.args_recv_info[0], num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self._receive_gradients(num_microbatches)

    def _receive_gradients(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        self.grad_recv_info = self.for_each_microbatch(self.grad_recv_info[0], num_microbatches)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if not _SETS_UP_TOGETHER:
            return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        made = super()._prepare_forward_infra(1, *args, **kwargs)
        self.args_recv_info = self.for_each_microbatch(self.args_recv_info[0], num_microbatches)
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if not _SETS_UP_TOGETHER:
            return super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        made = super()._prepare_backward_infra(1, *args, **kwargs)
        self._receive_gradients(num_microbatches)
        return made

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """First messages to the neighbours; those that are on this rank itself cannot be reached by one in 2.11."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def wants_gradients(self) -> Sequence[bool]:
        """Of which tensors that a forward receives a gradient goes back."""
        raise NotImplementedError

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        stages: list[int | None] = super()._create_grad_send_info(args_recv_info)
        return [stage if wanted else None for stage, wanted in zip(stages, self.wants_gradients(), strict=True)]

    def _get_recv_ops(self, recv_infos: tuple[Any, ...], *group: Any) -> list[dist.P2POp]:
        """Receives of what there is memory for; torch 2.11 expects a gradient of every tensor, 2.14 is told a group."""
        return super()._get_recv_ops(tuple(info for info in recv_infos if info.buffer is not None), *group)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from a stage of the same rank; torch 2.11 has no word for one that there is not."""
        if _SETS_UP_TOGETHER:
            next_stage_bwd_outputs = tuple(torch.empty(0) if g is None else g for g in next_stage_bwd_outputs)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def note_gradients(self, infos: tuple[Any, ...]) -> None:
        """Say it to the memory for what a forward receives, which torch 2.11 asks."""
        for info, wanted in zip(infos, self.wants_gradients(), strict=True) if _SETS_UP_TOGETHER else ():
            info.buffer.requires_grad_(wanted)

    def _validate_fwd_input(self, *_: Any) -> None:
        """Nothing: microbatches may be of other sizes than the first. Torch 2.11 checks always, later where asked."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Nothing, likewise."""

    def clear_runtime_states(self) -> None:
        """What a step leaves behind goes. The tensors received are gone already, which torch 2.11 would look into."""
        received, self.args_recv_info = self.args_recv_info, {}
        super().clear_runtime_states()
        self.args_recv_info = received


class Schedule(_PipelineScheduleRuntime):
    """Runs given actions in place of those of a schedule of torch's."""

    def follow(self, actions: Mapping[int, Sequence[Action]]) -> None:
        """actions: of every rank, with communication."""
        self._prepare_schedule_with_comms({rank: list(own) for rank, own in actions.items()}, format="compute_comms")

    def run_by(self, kind: Kind, function: Callable[[Action, Any], None]) -> None:
        """Have ``function`` run actions of ``kind``."""
        self._comp_type_to_function_map[kind] = function

    def run_forward(self, action: Any, context: Any) -> None:
        """Run the forward of a pair, as the base class runs a forward. context: of the function that runs the pair."""
        number, microbatch = action.stage_index, action.microbatch_index
        stages: dict[int, Any] = {stage.stage_index: stage for stage in self._stages}
        _wait_batch_p2p(self.fwd_recv_ops.pop((number, microbatch), []))
        inputs = context.kwarg_mbs[microbatch]
        output = stages[number].forward_one_chunk(microbatch, (), inputs, save_forward_output=False)
        if stages[number].is_last:
            cast(Any, self)._internal_losses.append(cast(Any, self)._loss_fn(output, context.target_mbs[microbatch]))
        if number + 1 in stages:
            stages[number + 1].set_local_fwd_input(output, microbatch)

    def run_backward(self, action: Any, context: Any) -> None:
        """Run the backward of a pair, likewise."""
        number, microbatch = action.stage_index, action.microbatch_index
        stages: dict[int, Any] = {stage.stage_index: stage for stage in self._stages}
        _wait_batch_p2p(self.bwd_recv_ops.pop((number, microbatch), []))
        self.backward_counter[number] += 1
        last = self.backward_counter[number] == self._n_microbatches
        loss = cast(Any, self)._maybe_get_loss(stages[number], microbatch)
        stages[number].backward_one_chunk(microbatch, loss, True, last)
        if number - 1 in stages:
            stages[number - 1].set_local_bwd_input(stages[number].get_local_bwd_output(microbatch), microbatch)

    @contextmanager
    def given(self, microbatches: Sequence[dict[str, torch.Tensor]]) -> Iterator[None]:
        """Within, a step runs these microbatches, by keyword; the base class cuts a batch into equal ones."""
        self._microbatches = microbatches
        try:
            yield
        finally:
            del self._microbatches

    def _split_inputs(self, args: Any, kwargs: Any = None) -> tuple[list[Any], list[Any]]:
        return [()] * len(self._microbatches), list(self._microbatches)

    @contextmanager
    def without_vote(self) -> Iterator[None]:
        """Within, stages do not vote on how to learn the shapes that they exchange, as nobody else is there to vote.

        Stages that were given their shapes know them. Before torch 2.13 there is no vote.
        """
        modes: Any = getattr(stages_of_torch, "InferenceMode", None)
        if modes is None:
            yield
            return

        def agreed(stages: Any, *_: Any) -> None:
            for stage in stages:
                stage._inference_mode = modes.STATIC

        self._warmup_p2p = agreed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self._warmup_p2p
