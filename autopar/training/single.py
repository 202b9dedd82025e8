"""The same training on one process, which a parallel run is compared with; and the optimiser of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.training.batches import arguments_of
from autopar.training.job import TrainingJob


class Single:
    """Trains a copy of the model on whole batches."""

    def __init__(self, model: nn.Module, job: TrainingJob) -> None:
        self.model = model
        self.optimizer = optimizer_of(job, model)

    def step(self, batch: Any) -> float:
        """One step; returns its loss."""
        args, kwargs = arguments_of(batch)
        output = self.model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def optimizer_of(job: TrainingJob, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the job names, over the parameters of ``model``."""
    if job.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
