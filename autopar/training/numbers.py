"""A loss or gradient norm that is not finite, or jumps: training stops, skips the step, or rolls back and skips it.

    --on-nan skip                               --on-nan rollback
    step 14    loss 2.31                        step 14    loss 2.31
    step 15    loss  nan   no update            step 15    loss  nan   back to the checkpoint after step 10
    step 16    loss 2.29                        step 11    ...         and once more, but step 15 without its update

A step that is left out counts: the batch after it and the random numbers are those of its number, under every plan.
All ranks look at the same numbers, those that rank 0 has, so that all of them do the same.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from autopar.ir.errors import Diverged, NotFinite
from autopar.runtime.loss_scaler import LossScaler
from autopar.runtime.module import ParallelModule
from autopar.runtime.state import gradient_norm
from autopar.runtime.undo import BeforeStep
from autopar.training.anomaly import WINDOW, Anomaly, anomaly_of
from autopar.training.batches import Batches
from autopar.training.finite import where_not_finite
from autopar.training.job import TrainingJob

_LOSS, _NORM = "loss", "gradient norm"
_IN_A_ROW = 10
"""Steps left out one after the other, after which training stops: parameters that do not change cannot recover."""
_TIMES_BACK = 3
"""How often training goes back to the same checkpoint."""
_RECORD = "skipped.jsonl"


@dataclass(frozen=True, slots=True)
class Verdict:
    """action: what to do instead of the optimiser's step, if anything. why: in words."""

    action: Literal["go on", "skip", "rollback"]
    why: str = ""


class Numbers:
    """Judges the steps of one rank. All ranks make one together, and call its methods in the same order."""

    def __init__(self, job: TrainingJob, parallel: ParallelModule, *, scaled: bool, saved: dict[str, Any] | None):
        """scaled: a LossScaler sees to what is not finite. saved: what ``state`` said, in a checkpoint."""
        self._job, self._parallel, self._scaled = job, parallel, scaled
        self._watches = job.on_nan != "stop" or job.max_jump is not None
        self._left_out: set[int] = set()
        self._recent: dict[str, deque[float]] = {}
        self._in_a_row = 0
        self._backs: Counter[int] = Counter()
        self._last: Anomaly | None = None
        self._before: BeforeStep | None = None
        self._take(saved)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the steps that are left out, some of which may come yet, and what jumps are seen by."""
        found: dict[str, Any] = {}
        if self._left_out:
            found["left_out"] = sorted(self._left_out)
        if self._job.max_jump is not None:
            found["recent"] = {what: list(values) for what, values in self._recent.items()}
        return found

    def begin(self, step: int) -> None:
        """Step number ``step``, counted from 1, is about to be made."""
        may_be_left_out = self._job.on_nan == "skip" or step in self._left_out
        self._before = BeforeStep(self._parallel.engine) if may_be_left_out else None

    def judge(self, step: int, loss: torch.Tensor, batches: Batches) -> Verdict:
        """What to do about a step whose gradients are there, before the optimiser reads them. All ranks call together.

        loss: scalar. Raises NotFinite or Diverged, on every rank, if training is to stop.
        """
        if step in self._left_out:
            return Verdict("skip", "left out")
        numbers = self._numbers(loss)
        recent: dict[str, Sequence[float]] = dict(self._recent)
        anomaly = anomaly_of(numbers, recent, self._job.max_jump, finite=not self._scaled)
        if anomaly is None:
            self._in_a_row = 0
            for what, value in numbers.items():
                if math.isfinite(value):
                    self._recent.setdefault(what, deque(maxlen=WINDOW)).append(value)
            return Verdict("go on")
        self._last = anomaly
        self._record(step, anomaly, batches)
        if self._job.on_nan == "stop":
            self._stop(step, anomaly)
        self._left_out.add(step)
        if self._job.on_nan == "rollback":
            return Verdict("rollback", str(anomaly))
        self._in_a_row += 1
        if self._in_a_row == _IN_A_ROW:
            self._stop(step, anomaly, f" It is step number {_IN_A_ROW} in a row without an update.")
        return Verdict("skip", f"left out: {anomaly}")

    def leave_out(self, scaler: LossScaler | None) -> None:
        """In place of the optimiser's step: what forward and backward have changed is as it was."""
        assert self._before is not None, "of a step that may be left out"
        self._before.put_back()
        if scaler is not None:
            scaler.leave_out()

    def went_back(self, step: int, saved: dict[str, Any] | None) -> None:
        """The state is that after ``step`` steps again. Raises if it has been so too often. saved: as at first."""
        self._backs[step] += 1
        if self._backs[step] > _TIMES_BACK:
            assert self._last is not None, "why training went back"
            self._stop(step, self._last, f" Training has gone back to this step {_TIMES_BACK} times.")
        self._take(saved)

    def _take(self, saved: dict[str, Any] | None) -> None:
        saved = {} if saved is None else saved
        self._left_out |= set(saved.get("left_out", ()))
        self._recent = {what: deque(values, maxlen=WINDOW) for what, values in saved.get("recent", {}).items()}

    def _numbers(self, loss: torch.Tensor) -> dict[str, float]:
        if not self._watches:
            return {_LOSS: float(loss)}
        engine = self._parallel.engine
        parameters = [(p, engine.stored[name]) for name, p in self._parallel.named_parameters()]
        with engine.accord.watched():
            told = torch.stack([loss.double(), gradient_norm(parameters, engine.mesh, engine.disk).double()])
            dist.broadcast(told, src=0)
        return dict(zip((_LOSS, _NORM), told.tolist(), strict=True))

    def _record(self, step: int, anomaly: Anomaly, batches: Batches) -> None:
        """A line of the file that says which samples to look at."""
        if self._job.saves_to is None or dist.get_rank() != 0:
            return
        first, end = (batches.state(number).get("samples") for number in (step - 1, step))
        fields = {
            "step": step,
            "action": self._job.on_nan,
            "what": anomaly.what,
            "value": anomaly.value if math.isfinite(anomaly.value) else str(anomaly.value),
            "median_before": anomaly.median,
            "first_sample": first,
            "num_samples": None if first is None or end is None else end - first,
        }
        folder = Path(self._job.saves_to)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _RECORD, "a") as file:
            file.write(json.dumps(fields) + "\n")

    def _stop(self, step: int, anomaly: Anomaly, more: str = "") -> NoReturn:
        folder = self._job.saves_to
        kept = "" if folder is None else f"\n  the checkpoint in {folder}, if there is one, is kept as it was"
        where = where_not_finite(self._parallel) if anomaly.median is None else ""
        choice = "" if self._job.on_nan != "stop" else "; --on-nan skip or rollback"
        text = f"step {step}: {anomaly}.{more}{where}{kept}\n  try: a smaller --lr, or a look at the data of this step"
        raise (NotFinite if anomaly.median is None else Diverged)(text + choice)
