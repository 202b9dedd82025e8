"""The loop that every rank of ``autopar train`` runs."""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.api import assemble
from autopar.ir.errors import AutoparError, CopiesDiffer, InvalidInput, LaunchError
from autopar.ir.plan import Plan
from autopar.runtime.agreement import agree, agree_same, from_first
from autopar.runtime.launch import ensure_process_group, this_device
from autopar.runtime.mesh import check_world_size
from autopar.training.batches import Batches, arguments_of, open_batches
from autopar.training.copies import Copies
from autopar.training.evaluation import HeldOut
from autopar.training.job import OpenedJob, TrainingJob
from autopar.training.notice import Notice
from autopar.training.numbers import Numbers
from autopar.training.own_time import OwnTime
from autopar.training.place import Place
from autopar.training.replicas import Replicas
from autopar.training.report import Report, tokens_of
from autopar.training.resuming import go_back, keep_start, resume
from autopar.training.saves import Saves
from autopar.training.warm import Warm


def say_here(line: str) -> None:
    """On standard output, at once."""
    print(line, flush=True)


@dataclass(frozen=True, slots=True)
class Result:
    """agrees: whether the losses agree with one process (True if they are not compared). left: the exit code of a rank
    that was asked to end before it had made all steps; else 0."""

    agrees: bool
    left: int = 0


def train(
    job: TrainingJob,
    say: Callable[[str], object] = say_here,
    *,
    opened: OpenedJob | None = None,
    place: Place | None = None,
    warm: Warm | None = None,
) -> Result:
    """Train as one rank of the job that this process is in. All ranks call together.

    say: takes the lines that rank 0 reports. opened: the job, if it is open already. place: of a rank that is
    supervised. warm: what the process has made that has forked this one. Raises AutoparError, on every rank.
    """
    notice = Notice()
    ensure_process_group(job.environment, None if place is None else place.meeting(job.environment.timeout))
    rank = dist.get_rank()
    opened = agree(lambda: job.opened() if opened is None else opened)
    if place is not None:
        opened = replace(opened, plan=Plan.from_yaml(place.plan))
    plan, source = opened.plan, opened.source
    _same_everywhere(opened)
    check_world_size(plan, dist.get_world_size())
    warm = Warm(opened) if warm is None else warm
    model = warm.model
    single = _Single(copy.deepcopy(model), job) if job.compare_single and rank == 0 else None
    example = source.meta_inputs(plan.batch.global_size, opened.seq_len)
    prepared = warm.prepared(plan.to_yaml())
    if prepared is None:
        parallel = autopar.parallelize(model, plan.num_ranks, example_inputs=example, plan=plan)
    else:
        parallel = assemble(model, example, prepared)
    optimizer = _optimizer(job, parallel)
    scaler = autopar.LossScaler(parallel) if plan.precision == "fp16" else None
    progress = resume(job, place, parallel, optimizer, scaler)
    done, saved = progress.step, progress.data
    batches = agree(lambda: open_batches(opened, model, saved, done))
    held_out = None if opened.held_out is None else agree(lambda: HeldOut(opened, model))
    report = Report(opened, this_device(), done, tokens_of(example), say if rank == 0 else lambda line: None)
    if saved is not None:
        report.resumed(saved.get("loss"))
    agree(lambda: _check_first(batches, held_out, done, parallel, single))
    if single is not None:
        # One process, if it is compared, trains from the start.
        for step in range(done):
            single.step(batches.whole(step))
    copies = None if place is None else Copies(parallel, optimizer, scaler, place)
    complain = partial(print, file=sys.stderr, flush=True) if rank == 0 else lambda line: None
    saves = Saves(job, parallel, optimizer, scaler, goes_on=place is not None, say=complain)
    agreement = parallel.engine.accord
    own_time = OwnTime(None if place is None else this_device())
    replicas = None if job.check_copies_every is None else Replicas(parallel)
    pending: deque[tuple[int, float, float, float | None, str]] = deque()
    numbers = Numbers(job, parallel, scaled=scaler is not None, saved=saved)
    if job.on_nan == "rollback":
        start_data = {**batches.state(done), **numbers.state()}
        keep_start(job, parallel, optimizer, scaler, replace(progress, data=start_data))

    def tell(safe: int) -> None:
        """A step is reported once nothing that ends could undo it."""
        while pending and pending[0][0] <= safe:
            report.step(*pending.popleft()[1:])

    step = done
    while step < job.steps:
        start, number = time.perf_counter(), step + 1
        agreement.notice = notice.code
        numbers.begin(number)
        own_time.begin()
        try:
            args, kwargs = arguments_of(batches.own(step, parallel))
        except AutoparError as error:
            agreement.fail(InvalidInput(f"step {number}: {error}"))
        own_time.loaded()
        loss = saves.step(args, kwargs)
        left = agreement.noticed
        verdict = numbers.judge(number, loss, batches)
        if verdict.action == "rollback":
            optimizer.zero_grad()
            if copies is not None:
                tell(copies.finish())
                copies.forget()
            pending.clear()
            progress = go_back(job, parallel, optimizer, scaler)
            step, saved = progress.step, progress.data
            report.went_back(number, step, verdict.why)
            numbers.went_back(step, saved)
            batches = agree(partial(open_batches, opened, model, saved, step))
            continue
        if copies is not None:
            copies.before_update()
        if verdict.action == "skip":
            numbers.leave_out(scaler)
        else:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad()
        step, value, own_s = number, float(loss), own_time.end()
        seconds = time.perf_counter() - start
        beside = None if single is None or verdict.action == "skip" else single.step(batches.whole(number - 1))
        pending.append((number, value, seconds, beside, verdict.why))
        last = number == job.steps or bool(left)
        if replicas is not None and (last or job.compares_after(number)):
            _compare(replicas, number, copies)
        state = {**batches.state(number), **numbers.state(), "loss": value}
        tell(number if copies is None else copies.after_update(number, state, own_s))
        if held_out is not None and (number == job.steps or (job.eval_every and number % job.eval_every == 0)):
            tell(number if copies is None else copies.finish())
            report.evaluation(number, held_out.loss(parallel))
        saves.after(number, state, last=last)
        if left and number < job.steps:
            break
    else:
        left = 0
    # A write may be going on; the process group has to outlive it.
    parallel.engine.background.finish()
    if copies is not None:
        tell(copies.finish())
    report.end()
    dist.barrier()
    return Result(report.agrees, left)


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
        "on_nan", "max_jump", "check_copies_every",
    )  # fmt: skip
    agree_same({name: getattr(opened.job, name) for name in names}, "autopar train")


def _check_first(batches: Batches, held_out: HeldOut | None, done: int, parallel: Any, single: _Single | None) -> None:
    """Raise what is wrong with the data of the first step, where all ranks can agree that it is."""
    batches.own(done, parallel)
    if held_out is not None:
        held_out.check(parallel)
    if single is not None and done:
        batches.whole(0)


def _compare(replicas: Replicas, step: int, copies: Copies | None) -> None:
    """Raise CopiesDiffer, on every rank, once nothing could go on from copies of what is wrong."""
    try:
        replicas.check(step)
    except CopiesDiffer:
        if copies is not None:
            copies.forget()
            dist.barrier()  # who has raised may be followed by the end of all ranks
        raise


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
