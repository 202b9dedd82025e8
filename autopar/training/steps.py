"""The steps of a run on one rank: what is done before, in and after each, and in which order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.errors import AutoparError, CopiesDiffer, InvalidInput
from autopar.runtime.agreement import agree
from autopar.runtime.checkpoint.loading import Progress
from autopar.runtime.module import ParallelModule
from autopar.training.batches import Batches, arguments_of
from autopar.training.copies import Copies
from autopar.training.evaluation import HeldOut
from autopar.training.job import OpenedJob
from autopar.training.notice import Notice
from autopar.training.numbers import Numbers, Verdict
from autopar.training.own_time import OwnTime
from autopar.training.replicas import Replicas
from autopar.training.report import Report
from autopar.training.resuming import go_back, keep_start
from autopar.training.saves import Saves
from autopar.training.single import Single


@dataclass(slots=True, kw_only=True)
class Steps:
    """What steps are made of.

    open_batches: from what a checkpoint says of the data, and its step. single: on the rank that compares with one
    process, else None. copies: in memory, of a rank that is supervised. replicas: where ranks compare what they hold
    in common.
    """

    opened: OpenedJob
    parallel: ParallelModule
    optimizer: torch.optim.Optimizer
    scaler: Any
    open_batches: Callable[[dict[str, Any] | None, int], Batches]
    batches: Batches
    held_out: HeldOut | None
    single: Single | None
    copies: Copies | None
    replicas: Replicas | None
    saves: Saves
    numbers: Numbers
    report: Report
    own_time: OwnTime
    notice: Notice
    _pending: deque[tuple[int, float, float, float | None, str]] = field(default_factory=deque)

    def run(self, progress: Progress) -> int:
        """From ``progress`` to the job's last step. Returns the exit code of a rank that was asked to end before it;
        else 0. All ranks call together. Raises AutoparError, on every rank."""
        job = self.opened.job
        if job.on_nan == "rollback":
            start = {**self.batches.state(progress.step), **self.numbers.state()}
            keep_start(job, self.parallel, self.optimizer, self.scaler, replace(progress, data=start))
        step = progress.step
        if step >= job.steps:
            self.saves.make_up_for(progress)
        while step < job.steps:
            start_s = time.perf_counter()
            loss, left = self._forward_and_backward(step)
            verdict = self.numbers.judge(step + 1, loss, self.batches)
            if verdict.action == "rollback":
                step = self._go_back(step + 1, verdict)
                continue
            self._update(verdict)
            step += 1
            self._after(step, float(loss), time.perf_counter() - start_s, verdict, last=step == job.steps or bool(left))
            if left and step < job.steps:
                return left
        return 0

    def end(self) -> None:
        """Wait for what is still written; report the last steps."""
        # A write may be going on; the process group has to outlive it.
        self.saves.finish()
        if self.copies is not None:
            self._tell(self.copies.finish())
        self.report.end()
        dist.barrier()

    def _forward_and_backward(self, step: int) -> tuple[torch.Tensor, int]:
        """The loss of the step after ``step``, and the exit code that some rank was asked to end with; else 0."""
        agreement = self.parallel.engine.accord
        agreement.notice = self.notice.code
        self.numbers.begin(step + 1)
        self.own_time.begin()
        try:
            args, kwargs = arguments_of(self.batches.own(step, self.parallel))
        except AutoparError as error:
            agreement.fail(InvalidInput(f"step {step + 1}: {error}"))
        self.own_time.loaded()
        return self.saves.step(args, kwargs), agreement.noticed

    def _update(self, verdict: Verdict) -> None:
        if self.copies is not None:
            self.copies.before_update()
        if verdict.action == "skip":
            self.numbers.leave_out(self.scaler)
        else:
            self.optimizer.step() if self.scaler is None else self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def _after(self, step: int, loss: float, seconds: float, verdict: Verdict, *, last: bool) -> None:
        """Copy, compare, evaluate, save and report, after ``step`` steps."""
        job, copies = self.opened.job, self.copies
        own_s, beside = self.own_time.end(), None
        if self.single is not None and verdict.action != "skip":
            beside = self.single.step(self.batches.whole(step - 1))
        self._pending.append((step, loss, seconds, beside, verdict.why))
        if self.replicas is not None and (last or job.compares_after(step)):
            self._compare(self.replicas, step)
        state = {**self.batches.state(step), **self.numbers.state(), "loss": loss}
        self._tell(step if copies is None else copies.after_update(step, state, own_s))
        if self.held_out is not None and (step == job.steps or (job.eval_every and step % job.eval_every == 0)):
            self._tell(step if copies is None else copies.finish())
            self.report.evaluation(step, self.held_out.loss(self.parallel))
        if last and copies is not None:  # a last checkpoint may fail, and the state has to be in memory then
            self._tell(copies.finish())
        self.saves.after(step, state, last=last)

    def _tell(self, safe: int) -> None:
        """A step is reported once nothing that ends could undo it."""
        while self._pending and self._pending[0][0] <= safe:
            self.report.step(*self._pending.popleft()[1:])

    def _go_back(self, number: int, verdict: Verdict) -> int:
        """To the last state that is kept, from the step ``number``, which is not made. Returns the steps made there."""
        self.optimizer.zero_grad()
        if self.copies is not None:
            self._tell(self.copies.finish())
            self.copies.forget()
        self._pending.clear()
        progress = go_back(self.opened.job, self.parallel, self.optimizer, self.scaler)
        self.report.went_back(number, progress.step, verdict.why)
        self.numbers.went_back(progress.step, progress.data)
        self.batches = agree(lambda: self.open_batches(progress.data, progress.step))
        return progress.step

    def _compare(self, replicas: Replicas, step: int) -> None:
        """Raise CopiesDiffer, on every rank, once nothing could go on from copies of what is wrong."""
        try:
            replicas.check(step)
        except CopiesDiffer:
            if self.copies is not None:
                self.copies.forget()
                dist.barrier()  # who has raised may be followed by the end of all ranks
            raise
