"""The output of ``autopar train``: a line a step, or one JSON object at the end."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from autopar.ir.torch_private import pytree
from autopar.training.job import OpenedJob

# Relative difference of the losses above which a comparison in float32 fails.
TOLERANCE = 1e-4


class Report:
    """Says the loss of every step, and at the end how fast and how exact it was."""

    def __init__(
        self, opened: OpenedJob, device: torch.device, done: int, batch_tokens: int | None, say: Callable[[str], object]
    ) -> None:
        """done: steps before those that are reported. batch_tokens: of a global batch. say: takes a line."""
        self.job, self.plan, self.opened = opened.job, opened.plan, opened
        self.device, self.done, self.batch_tokens, self.say = device, done, batch_tokens, say
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.singles: list[float] = []
        self.differences: list[float] = []
        self.evaluations: list[tuple[int, float]] = []
        self.left_out: dict[int, str] = {}
        plan = self.plan
        mesh = "  ".join([f"pp {plan.num_pipeline_ranks}", *(f"{axis} {size}" for axis, size in plan.mesh.items())])
        self._line(f"{plan.model.name} on {plan.num_ranks} {device.type} ranks: {mesh}  {plan.precision_words}")
        if opened.corpus is not None:
            self._line(str(opened.corpus))
        columns = "   one process   relative difference" if self.job.compare_single else ""
        self._line(f"step        loss{columns}   seconds")

    def resumed(self, loss: float | None) -> None:
        """The run goes on after ``done`` steps. loss: of the last of them, if it is known."""
        if loss is not None:
            self._line(f"{self.done:4d}  {loss:10.6f}   before")

    def step(self, loss: float, seconds: float, single: float | None, left_out: str = "") -> None:
        """Report one step: its loss, its seconds, and the loss of one process if that runs beside.

        left_out: why the optimiser has not made it, if so.
        """
        self.losses.append(loss)
        self.seconds.append(seconds)
        columns = ""
        if single is not None:
            # NaN on either side counts as the largest difference there is.
            difference = abs(loss - single) / abs(single) if loss == loss and single == single else float("inf")
            self.singles.append(single)
            self.differences.append(difference)
            columns = f"   {single:11.6f}   {difference:19.1e}"
        note = f"   {left_out}" if left_out else ""
        number = self.done + len(self.seconds)
        if left_out:
            self.left_out.setdefault(number, left_out)
        self._line(f"{number:4d}  {loss:10.6f}{columns}   {seconds:7.3f}{note}")

    def went_back(self, step: int, steps: int, why: str) -> None:
        """In step number ``step`` training has gone back to the state after ``steps`` steps, for a reason."""
        self.left_out[step] = why
        made = max(0, steps - self.done)
        self.done = min(self.done, steps)
        del self.losses[made:], self.seconds[made:], self.singles[made:], self.differences[made:]
        self.evaluations = [(number, loss) for number, loss in self.evaluations if number <= steps]
        self._line(f"{step:4d}  {why}: back to step {steps}")

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after ``step`` steps."""
        self.evaluations.append((step, loss))
        self._line(f"{step:4d}  {loss:10.6f}   held out")

    def end(self) -> None:
        """Report the run as a whole: as one JSON object, or the median step."""
        if self.job.json:
            self.say(json.dumps(self.summary()))
            return
        if not self.seconds:
            self._line(f"nothing to do: {self.done} steps are done")
            return
        tokens = "" if self.batch_tokens is None else f"   {self.batch_tokens / self.median_s:,.0f} tokens/s"
        self._line(f"median step {self.median_s:.3f} s{tokens}")
        if self.differences:
            self._line(f"largest relative difference from one process: {max(self.differences):.1e}")

    @property
    def median_s(self) -> float:
        """Median seconds of the steps without the first, which also allocates and connects."""
        return statistics.median(self.seconds[1:] or self.seconds)

    @property
    def agrees(self) -> bool:
        """Whether no loss differs from that of one process by more than TOLERANCE; always so unless fp32."""
        return not self.differences or self.plan.precision_words != "fp32" or max(self.differences) <= TOLERANCE

    def summary(self) -> dict[str, Any]:
        """The object that ``--json`` prints. Times in seconds, one of each step that was made."""
        plan, median = self.plan, self.median_s if self.seconds else None
        found: dict[str, Any] = {
            "model": plan.model.name,
            "device": self.device.type,
            "num_ranks": plan.num_ranks,
            "pp": plan.num_pipeline_ranks,
            "mesh": dict(plan.mesh),
            "precision": plan.precision_words,
            "global_batch": plan.batch.global_size,
            "data": None if self.opened.corpus is None else str(self.opened.corpus),
            "first_step": self.done + 1,
            "losses": [loss if math.isfinite(loss) else None for loss in self.losses],
            "step_times_s": self.seconds,
            "step_time_s": median,
            "samples_per_s": None if median is None else plan.batch.global_size / median,
            "tokens_per_s": None if median is None or self.batch_tokens is None else self.batch_tokens / median,
        }
        if self.left_out:
            found["left_out"] = [{"step": step, "why": why} for step, why in sorted(self.left_out.items())]
        if self.opened.held_out is not None:
            found["eval_steps"] = [step for step, _ in self.evaluations]
            found["eval_losses"] = [loss for _, loss in self.evaluations]
        if self.job.compare_single:
            largest = max(self.differences, default=0.0)
            found |= {"single_losses": self.singles, "largest_difference": largest, "agrees": self.agrees}
        return found

    def _line(self, line: str) -> None:
        if not self.job.json:
            self.say(line)


def tokens_of(inputs: Any) -> int | None:
    """Token ids in a batch: the elements of its first tensor of integers with a sequence; None without one."""
    for value in pytree.tree_leaves(inputs):
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() >= 2:
            return value.numel()
    return None
