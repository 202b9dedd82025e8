"""Running one rank of a plan on fake tensors, in a process of its own.

The engine is the one that trains. It runs on a process group that sends nothing and gives nothing back, in which this
process claims to be any rank of any number; tensors have shapes and no values.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from autopar.checking.recorder import Communication, Recorder
from autopar.ir.errors import AutoparError
from autopar.ir.fork import fork
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Batch, Plan
from autopar.ir.program import StageProgram
from autopar.ir.torch_private import FakeTensorMode
from autopar.runtime.torch_private import fake_store

# What a rank runs: for its number, the programs of all stages.
Programs = Callable[[int], Sequence[StageProgram]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One training step of one rank, the optimiser's included.

    num_microbatches: that the step had, as many as show all that happens. persistent_bytes: of parameters, gradients
    and optimiser between steps; peak_bytes: most at once in the step.
    """

    rank: int
    num_microbatches: int
    communications: tuple[Communication, ...]
    persistent_bytes: int
    peak_bytes: int


def run_ranks(
    build: Callable[[], nn.Module],
    captured: CapturedModel,
    plan: Plan,
    programs: Programs,
    ranks: Sequence[int],
    *,
    processes: int = 2,
) -> list[RankTrace]:
    """Traces of ``ranks``, each from a forked process. build: makes the model; it is called on fake tensors.

    Raises AutoparError with what went wrong on a rank.
    """
    waiting, found = list(ranks), dict[int, RankTrace]()
    running: dict[Any, tuple[int, int]] = {}
    try:
        # From this thread alone: a fork beside other threads may find their locks taken.
        while waiting or running:
            while waiting and len(running) < processes:
                rank = waiting.pop(0)
                receiving, sending = Pipe(duplex=False)
                own = programs(rank)
                process = fork()
                if process == 0:
                    _main(sending, build, captured, plan, own, rank)
                sending.close()
                running[receiving] = rank, process
            for ready in wait(list(running)):
                rank, process = running.pop(ready)
                found[rank] = _result(rank, ready)
                os.waitpid(process, 0)
    finally:
        for _, process in running.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return [found[rank] for rank in ranks]


def _result(rank: int, receiving: Any) -> RankTrace:
    try:
        result: RankTrace | str = receiving.recv()
    except EOFError:
        result = "its process ended without a word"
    if isinstance(result, str):
        raise AutoparError(f"rank {rank} cannot run its program:\n{result}")
    return result


def _main(
    sending: Any,
    build: Callable[[], nn.Module],
    captured: CapturedModel,
    plan: Plan,
    programs: Sequence[StageProgram],
    rank: int,
) -> NoReturn:
    """Body of a copy: its rank's trace is sent, or what went wrong, and the copy ends."""
    try:
        sending.send(run_rank(build, captured, plan, programs, rank))
    except Exception as error:
        lines = traceback.format_exc().splitlines() if not isinstance(error, AutoparError) else [str(error)]
        sending.send("\n".join(lines[-12:]))
    finally:
        sending.close()
        os._exit(0)


def run_rank(
    build: Callable[[], nn.Module], captured: CapturedModel, plan: Plan, programs: Sequence[StageProgram], rank: int
) -> RankTrace:
    """The trace of one rank. The default process group must not be there yet; it is, afterwards."""
    from autopar.runtime.engine import Engine

    dist.init_process_group("fake", rank=rank, world_size=plan.num_ranks, store=fake_store())
    plan, programs = shortened(plan, programs)
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    with warnings.catch_warnings(), mode:
        warnings.simplefilter("ignore")
        model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Outside the mode: meshes of ranks are small tensors with values.
        engine = Engine(model, captured, plan, programs)
        del model
        with mode:
            inputs = _inputs(engine, captured, plan)
            recorder.memory.add(engine.tensor(name) for name in (*engine.layouts, *engine.buffers))
            parameters = [p for stage in engine.local for p in stage.module.parameters() if p.requires_grad]
            with recorder:
                optimizer = torch.optim.AdamW(parameters, foreach=False)
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            recorder.communications.clear()
            persistent = recorder.memory.now
            optimizer.zero_grad()
            recorder.memory.reset()
            alone = nullcontext() if engine.pipeline is None else engine.pipeline.without_vote()
            with recorder, alone:
                engine.step(inputs)
                optimizer.step()
    return RankTrace(
        rank=rank,
        num_microbatches=plan.batch.num_microbatches,
        communications=tuple(recorder.communications),
        persistent_bytes=persistent,
        peak_bytes=recorder.memory.peak,
    )


def shortened(plan: Plan, programs: Sequence[StageProgram]) -> tuple[Plan, tuple[StageProgram, ...]]:
    """The plan with as many microbatches of the same size as show all that happens in a step."""
    count = plan.batch.num_microbatches
    ranks = plan.num_pipeline_ranks
    # After a rank's share of forwards, 1F1B and ZB-2p repeat themselves.
    steady = {"1f1b": ranks + 1, "zb-2p": 2 * ranks + 1}.get(plan.schedule, 2 * ranks)
    least = 2 if plan.num_stages == 1 else steady
    for fewer in range(least, count):
        if replace(plan.pipelining, num_microbatches=fewer).obstacle() is None:
            batch = Batch(global_size=plan.planned_rows // count * fewer, num_microbatches=fewer)
            plan = plan.model_copy(update={"batch": batch})
            return plan, tuple(replace(program, num_microbatches=fewer) for program in programs)
    return plan, tuple(programs)


def _inputs(engine: Any, captured: CapturedModel, plan: Plan) -> dict[str, torch.Tensor]:
    """This rank's rows of a global batch of ``plan``, which may be shorter than the captured one."""
    values = {node.name: node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"}
    inputs = {}
    for name, step_input in captured.inputs.items():
        shape = list(values[name].shape)
        if step_input.batch_dim is not None:
            shape[step_input.batch_dim] = plan.planned_rows // plan.data_parallel_size
        inputs[name] = torch.zeros(shape, dtype=values[name].dtype, device=engine.device)
    return inputs
