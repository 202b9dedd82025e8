"""Forwards through the stages of a pipeline, without gradients: evaluation.

    time          0   1   2   3   4
    stage 0      0F0 0F1 0F2
    stage 1          1F0 1F1 1F2
    stage 2              2F0 2F1 2F2

Microbatch ``m`` is in stage ``s`` at time ``m + s``, whatever the schedule of training; sends and receives are put
between these passes by torch.distributed.pipelining, in an order in which no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.program import StageProgram
from autopar.ir.schedule import Pipelining
from autopar.runtime.randomness import Randomness
from autopar.runtime.stage_module import StageModule
from autopar.runtime.torch_private_pipelining import Action, Kind, with_communication


@dataclass(frozen=True, slots=True)
class _Stage:
    program: StageProgram
    module: StageModule


class ForwardPipeline:
    """Runs one variant of the stages of this rank, in step with the other ranks of the pipeline."""

    def __init__(
        self,
        stages: Sequence[tuple[StageProgram, StageModule]],
        shape: Pipelining,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        randomness: Randomness,
    ) -> None:
        self._stages = {program.stage: _Stage(program, module) for program, module in stages}
        self._shape, self._group, self._device, self._random = shape, group, device, randomness
        self._actions: dict[int, list[Any]] = {}

    def run(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """Results of the last stage for each microbatch; nothing if it is on another rank.

        microbatches: the step inputs of each. The variant is selected already.
        """
        arrived: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        receiving: dict[tuple[int, int], tuple[list[torch.Tensor], list[dist.Work]]] = {}
        sending: list[dist.Work] = []
        results: list[tuple[torch.Tensor, ...]] = []
        for action in self._order(len(microbatches)):
            number, microbatch = action.stage_index, action.microbatch_index
            stage, kind = self._stages[number], action.computation_type
            if kind == Kind.RECV_F:
                specs = stage.program.received
                sizes = stage.module.sizes[microbatch]
                buffers = [torch.empty(sizes.shape(s.shape), dtype=s.dtype, device=self._device) for s in specs]
                receiving[number, microbatch] = buffers, self._start(dist.irecv, buffers, number - 1)
            elif kind == Kind.SEND_F:
                sending += self._start(dist.isend, arrived.pop((number + 1, microbatch)), number + 1)
            else:
                if (number, microbatch) in receiving:
                    buffers, works = receiving.pop((number, microbatch))
                    for work in works:
                        work.wait()
                    arrived[number, microbatch] = tuple(buffers)
                received = arrived.pop((number, microbatch), ())
                inputs = {name: microbatches[microbatch][name] for name in stage.program.given}
                stage.module.begin(microbatch)
                with self._random.of(stage.module, microbatch):
                    outputs = tuple(stage.module(*received, **inputs))
                if number == self._shape.num_stages - 1:
                    results.append(outputs)
                else:
                    # What is sent has to be contiguous, and to be there until it is.
                    arrived[number + 1, microbatch] = tuple(output.contiguous() for output in outputs)
        for work in sending:
            work.wait()
        return results

    def share(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of the last stage on every rank of the pipeline. results: memory for them on the others."""
        last = dist.get_global_rank(self._group, self._shape.rank_of(self._shape.num_stages - 1))
        for number, value in enumerate(results):
            results[number] = value.contiguous()
            dist.broadcast(_sendable(results[number]), src=last, group=self._group)
        return results

    def _order(self, count: int) -> list[Any]:
        """What this rank does for ``count`` microbatches."""
        if count not in self._actions:
            passes: dict[int, list[Any]] = {}
            for rank in range(self._shape.num_ranks):
                places = [(m + s, s, m) for s in self._shape.stages_of(rank) for m in range(count)]
                passes[rank] = [Action(s, Kind.FORWARD, m) for _, s, m in sorted(places)]
            lowered = with_communication(passes, self._shape.rank_of, self._shape.num_stages)
            self._actions[count] = lowered[self._group.rank()]
        return self._actions[count]

    def _start(self, what: Any, tensors: Sequence[torch.Tensor], stage: int) -> list[dist.Work]:
        peer = dist.get_global_rank(self._group, self._shape.rank_of(stage))
        works: list[dist.Work] = []
        if tensors:
            works = dist.batch_isend_irecv([dist.P2POp(what, _sendable(t), peer, self._group) for t in tensors])
        return works


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that gloo and NCCL send."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
