"""The loop that every rank of ``autopar train`` runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import AutoparError, InvalidInput, LaunchError
from autopar.runtime.agreement import agree, agree_same, from_first
from autopar.training.batches import Batches, arguments_of, open_batches
from autopar.training.evaluation import HeldOut
from autopar.training.finite import check_finite
from autopar.training.job import OpenedJob, TrainingJob
from autopar.training.report import Report, tokens_of
from autopar.training.resuming import resume


def say_here(line: str) -> None:
    """On standard output, at once."""
    print(line, flush=True)


def train(job: TrainingJob, say: Callable[[str], object] = say_here) -> bool:
    """Train as one rank of the job that this process is in. All ranks call together.

    say: takes the lines that rank 0 reports. Returns whether the losses agree with one process (True if they are not
    compared). Raises AutoparError, on every rank.
    """
    import autopar
    from autopar.runtime.launch import ensure_process_group, this_device
    from autopar.runtime.mesh import check_world_size

    ensure_process_group(job.environment)
    rank = dist.get_rank()
    opened = agree(job.opened)
    plan, source = opened.plan, opened.source
    _same_everywhere(opened)
    check_world_size(plan, dist.get_world_size())
    torch.manual_seed(job.seed)
    model = source.build()
    if not model.training:
        model.train()
    single = _Single(copy.deepcopy(model), job) if job.compare_single and rank == 0 else None
    example = source.meta_inputs(plan.batch.global_size, opened.seq_len)
    parallel = autopar.parallelize(model, plan.num_ranks, example_inputs=example, plan=plan)
    optimizer = _optimizer(job, parallel)
    scaler = autopar.LossScaler(parallel) if plan.precision == "fp16" else None
    progress = resume(job, parallel, optimizer, scaler)
    done = progress.step
    batches = agree(lambda: open_batches(opened, model, progress.data, done))
    held_out = None if opened.held_out is None else agree(lambda: HeldOut(opened, model))
    report = Report(opened, this_device(), done, tokens_of(example), say if rank == 0 else lambda line: None)
    agree(lambda: _check_first(batches, held_out, done, parallel, single))
    if single is not None:
        # One process, if it is compared, trains from the start.
        for step in range(done):
            single.step(batches.whole(step))
    for step in range(done, job.steps):
        start = time.perf_counter()
        try:
            args, kwargs = arguments_of(batches.own(step, parallel))
        except AutoparError as error:
            parallel.engine.accord.fail(InvalidInput(f"step {step + 1}: {error}"))
        loss = parallel.step(*args, **kwargs)
        if scaler is None:
            check_finite(parallel, loss, step + 1, job.saves_to)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad()
        value = float(loss)
        seconds = time.perf_counter() - start
        report.step(value, seconds, None if single is None else single.step(batches.whole(step)))
        number = step + 1
        if held_out is not None and (number == job.steps or (job.eval_every and number % job.eval_every == 0)):
            report.evaluation(number, held_out.loss(parallel))
        if job.saves_to is not None and job.saves_after(number):
            where, data = job.saves_to, batches.state(number)
            autopar.save(
                parallel, optimizer, where, scaler=scaler, step=number, data=data, asynchronous=True, keep=job.keep
            )
    # A write may be going on; the process group has to outlive it.
    parallel.engine.background.finish()
    report.end()
    dist.barrier()
    return report.agrees


def _same_everywhere(opened: OpenedJob) -> None:
    """Raise on all ranks if machines have different plans or data. All ranks call together."""
    plan = opened.plan.to_yaml()
    data = "" if opened.corpus is None else opened.corpus.digest
    held_out = "" if opened.held_out is None else opened.held_out.digest
    first_plan, first_data = from_first(lambda: plan), from_first(lambda: data)
    first_held_out = from_first(lambda: held_out)

    def check() -> None:
        for what, path, own, first in (
            ("plan", opened.job.plan, plan, first_plan),
            ("data", opened.job.data, data, first_data),
            ("held-out data", opened.job.eval_data, held_out, first_held_out),
        ):
            if own != first:
                raise LaunchError(
                    f"the {what} {path} of rank {dist.get_rank()} is not that of rank 0.\n"
                    "  try: the same files on every machine, or a folder that all of them share"
                )

    agree(check)
    names = (
        "steps", "optimizer", "learning_rate", "seed", "save_every", "keep", "eval_every", "eval_batches", "seq_len",
    )  # fmt: skip
    agree_same({name: getattr(opened.job, name) for name in names}, "autopar train")


def _check_first(batches: Batches, held_out: HeldOut | None, done: int, parallel: Any, single: _Single | None) -> None:
    """Raise what is wrong with the data of the first step, where all ranks can agree that it is."""
    batches.own(done, parallel)
    if held_out is not None:
        held_out.check(parallel)
    if single is not None and done:
        batches.whole(0)


class _Single:
    """The same training on one process, for comparison."""

    def __init__(self, model: nn.Module, job: TrainingJob) -> None:
        self.model = model
        self.optimizer = _optimizer(job, model)

    def step(self, batch: Any) -> float:
        args, kwargs = arguments_of(batch)
        output = self.model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def _optimizer(job: TrainingJob, model: nn.Module) -> torch.optim.Optimizer:
    if job.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
