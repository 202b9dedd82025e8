"""What a pipeline runs, and what it keeps alive, are what the schedule says: measured."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from autopar.ir.errors import InvalidPlan
from autopar.ir.plan import Plan
from autopar.ir.schedule import Schedule
from autopar.runtime import recomputation, split_activations
from autopar.runtime.engine import Engine
from autopar.runtime.module import ParallelModule
from autopar.runtime.split_activations import Saved
from tests.harness import run_ranks
from tests.runtime.handmade import batch, captured_tied, data_parallel_programs, model, plan_for

# Stages and microbatches on two ranks.
CASES: dict[Schedule, tuple[int, int]] = {
    "naive": (2, 4),
    "gpipe": (2, 4),
    "1f1b": (2, 8),
    "interleaved": (4, 8),
    "zb-h1": (2, 8),
    "zb-2p": (2, 8),
    "zb-v": (4, 8),
    "dualpipe-v": (4, 8),
}


def plan_of(schedule: Schedule, **rest: Any) -> Plan:
    stages, chunks = CASES[schedule]
    return plan_for({}, stages=stages, chunks=chunks, schedule=schedule, virtual_stages=stages // 2, **rest)


class _Box:
    """A tensor that autograd keeps."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _measured(schedule: Schedule) -> tuple[list[str], dict[int, int]]:
    """Passes in the order in which this rank ran them; per stage, of how many microbatches autograd kept tensors."""
    captured, plan = captured_tied(), plan_of(schedule)
    engine = Engine(model(), captured, plan, data_parallel_programs(captured, plan))
    ran: list[str] = []
    kept: Counter[tuple[int, int]] = Counter()
    peak: dict[int, int] = {}
    assert engine.pipeline is not None

    def forget(key: tuple[int, int]) -> None:
        kept[key] -= 1

    def watch(stage: Any) -> None:
        number = stage.stage_index
        forward, backward, weights = (
            stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk,
        )  # fmt: skip

        def run_forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            def note(box: object) -> None:
                kept[number, microbatch] += 1
                weakref.finalize(box, forget, (number, microbatch))
                alive = sum(count > 0 for (other, _), count in kept.items() if other == number)
                peak[number] = max(peak.get(number, 0), alive)

            def pack(value: torch.Tensor) -> _Box:
                # An output with its history would hold the node that holds it.
                box = _Box(value.detach())
                note(box)
                return box

            class Noted(Saved):
                """Of a schedule that splits the backward."""

                def __init__(self, *args: Any) -> None:
                    super().__init__(*args)
                    note(self)

            ran.append(f"{number}F{microbatch}")
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.value)
            patched = [mock.patch.object(module, "Saved", Noted) for module in (recomputation, split_activations)]
            with hooks, patched[0], patched[1]:
                return forward(microbatch, *args, **kwargs)

        def run_backward(microbatch: int, loss: Any = None, full_backward: bool = True, **rest: Any) -> None:
            ran.append(f"{number}{'B' if full_backward else 'I'}{microbatch}")
            backward(microbatch, loss=loss, full_backward=full_backward, **rest)

        def run_weights(microbatch: int, **rest: Any) -> None:
            ran.append(f"{number}W{microbatch}")
            weights(microbatch, **rest)

        stage.forward_one_chunk, stage.backward_one_chunk = run_forward, run_backward
        stage.backward_weight_one_chunk = run_weights

    for stage in engine.pipeline.stages:
        watch(stage)
    parallel = ParallelModule(engine)
    parallel.step(**parallel.shard_batch(batch(0)))
    assert not any(kept.values()), f"kept beyond the step: {+kept}"
    return ran, peak


def _measure_all() -> dict[str, Any]:
    return {schedule: _measured(schedule) for schedule in CASES}


def test_passes_and_live_activations_are_those_of_the_schedule() -> None:
    results = run_ranks(_measure_all, 2)
    for schedule in CASES:
        shape = plan_of(schedule).pipelining
        for rank, result in enumerate(results):
            ran, peak = result[schedule]
            assert " ".join(ran) == " ".join(map(str, shape.orders()[rank]))
            assert peak == {stage: shape.live()[stage] for stage in shape.stages_of(rank)}


def test_plans_that_no_schedule_runs() -> None:
    def text(**changes: Any) -> str:
        plan = plan_for({"dp": 2}, stages=4, chunks=4, schedule="zb-v", virtual_stages=2)
        return plan.model_copy(update=changes).to_yaml()

    assert Plan.from_yaml(text()).num_ranks == 4
    with pytest.raises(InvalidPlan, match="virtual_stages: 4 stages do not divide into 3 a rank; try 3 stages"):
        Plan.from_yaml(text(virtual_stages=3))
    with pytest.raises(InvalidPlan, match=r"schedule: zb-v has 2 virtual stages a rank, not 1"):
        Plan.from_yaml(text(virtual_stages=1))
