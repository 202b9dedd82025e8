"""What every rank of ``autopar train`` does: it joins the others, sets up the run, and makes its steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

import autopar
from autopar.api import assemble
from autopar.ir.errors import LaunchError
from autopar.ir.plan import Plan
from autopar.runtime.agreement import agree, agree_same, from_first
from autopar.runtime.flight_recorder import record
from autopar.runtime.launch import ensure_process_group, this_device
from autopar.runtime.mesh import check_world_size
from autopar.runtime.module import ParallelModule
from autopar.runtime.torch_private import timeout_of
from autopar.training.batches import open_batches
from autopar.training.copies import Copies
from autopar.training.evaluation import HeldOut
from autopar.training.job import OpenedJob, TrainingJob
from autopar.training.notice import Notice
from autopar.training.numbers import Numbers
from autopar.training.own_time import OwnTime
from autopar.training.place import Place
from autopar.training.replicas import Replicas
from autopar.training.report import Report, tokens_of
from autopar.training.resuming import resume
from autopar.training.saves import Saves
from autopar.training.single import Single, optimizer_of
from autopar.training.stands_still import tell_if_it_stands_still
from autopar.training.steps import Steps
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
    if place is not None:
        record()
    ensure_process_group(job.environment, None if place is None else place.meeting(job.environment.timeout))
    opened = agree(lambda: job.opened() if opened is None else opened)
    if place is not None:
        assert dist.group.WORLD is not None, "it has been joined"
        tell_if_it_stands_still(place.progress, timeout_of(dist.group.WORLD, this_device()).total_seconds())
        opened = replace(opened, plan=Plan.from_yaml(place.plan))
    _same_everywhere(opened)
    check_world_size(opened.plan, dist.get_world_size())
    warm = Warm(opened) if warm is None else warm
    first = dist.get_rank() == 0
    single = Single(copy.deepcopy(warm.model), job) if job.compare_single and first else None
    parallel = _parallel(opened, warm)
    optimizer = optimizer_of(job, parallel)
    scaler = autopar.LossScaler(parallel) if opened.plan.precision == "fp16" else None
    progress = resume(job, place, parallel, optimizer, scaler)
    saved = progress.data
    open_at = partial(open_batches, opened, warm.model)
    complain = partial(print, file=sys.stderr, flush=True) if first else _silent
    steps = Steps(
        opened=opened,
        parallel=parallel,
        optimizer=optimizer,
        scaler=scaler,
        open_batches=open_at,
        batches=agree(lambda: open_at(saved, progress.step)),
        held_out=None if opened.held_out is None else agree(lambda: HeldOut(opened, warm.model)),
        single=single,
        copies=None if place is None else Copies(parallel, optimizer, scaler, place),
        replicas=None if job.check_copies_every is None else Replicas(parallel),
        saves=Saves(job, parallel, optimizer, scaler, goes_on=place is not None, say=complain),
        numbers=Numbers(job, parallel, scaled=scaler is not None, saved=saved),
        report=Report(opened, this_device(), progress.step, tokens_of(_example(opened)), say if first else _silent),
        own_time=OwnTime(None if place is None else this_device()),
        notice=notice,
    )
    if saved is not None:
        steps.report.resumed(saved.get("loss"))
    agree(lambda: _check_first(steps, progress.step))
    if single is not None:
        # One process, if it is compared, trains from the start.
        for step in range(progress.step):
            single.step(steps.batches.whole(step))
    left = steps.run(progress)
    steps.end()
    return Result(steps.report.agrees, left)


def _silent(line: str) -> None:
    """Of ranks that report nothing."""


def _example(opened: OpenedJob) -> Any:
    """Inputs of a global batch, on the meta device."""
    return opened.source.meta_inputs(opened.plan.planned_rows, opened.seq_len)


def _parallel(opened: OpenedJob, warm: Warm) -> ParallelModule:
    """The model under the plan of the job, from what was prepared before this process was forked if it is there."""
    prepared = warm.prepared(opened.plan.to_yaml())
    if prepared is not None:
        return assemble(warm.model, _example(opened), prepared, disk=opened.job.disk)
    plan, disk = opened.plan, opened.job.disk
    return autopar.parallelize(warm.model, plan.num_ranks, example_inputs=_example(opened), plan=plan, disk=disk)


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


def _check_first(steps: Steps, done: int) -> None:
    """Raise what is wrong with the data of the first step, where all ranks can agree that it is."""
    steps.batches.own(done, steps.parallel)
    if steps.held_out is not None:
        steps.held_out.check(steps.parallel)
    if steps.single is not None and done:
        steps.batches.whole(0)
