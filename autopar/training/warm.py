"""What all ranks of a host make alike, made once by the process that forks them: the model, its graph, its programs."""

from __future__ import annotations

import torch
from torch import nn

from autopar.api import Prepared
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.training.job import OpenedJob


class Warm:
    """The model with the values that its seed gives it, and the programs of plans for it."""

    def __init__(self, opened: OpenedJob) -> None:
        self._opened = opened
        self._model: nn.Module | None = None
        self._captured: dict[int, CapturedModel] = {}
        """By the rows of a step."""
        self._prepared: dict[str, Prepared] = {}

    @property
    def model(self) -> nn.Module:
        """In train mode. It is made at the first call, which sets torch's generator to the seed of the job."""
        if self._model is None:
            torch.manual_seed(self._opened.job.seed)
            self._model = self._opened.source.build().train()
        return self._model

    def prepare(self, text: str) -> None:
        """Work out the programs of a plan, given as text. Raises AutoparError."""
        if text in self._prepared:
            return
        plan, source = Plan.from_yaml(text), self._opened.source
        rows = plan.planned_rows
        if rows not in self._captured:
            inputs = source.meta_inputs(rows, self._opened.seq_len)
            self._captured[rows] = normalise(capture(self.model, inputs), check=False)
        self._prepared[text] = Prepared.of(self._captured[rows], plan)

    def prepared(self, text: str) -> Prepared | None:
        """The programs of a plan, if they are worked out."""
        return self._prepared.get(text)
