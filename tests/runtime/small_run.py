"""A small model that two ranks train, with everything that a checkpoint holds, and what of it there is at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.primitives.read_parameter import local_of


class Net(nn.Module):
    """Two matrices and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).square().mean()


class SmallRun:
    """Net on two ranks that each hold half of every parameter."""

    def __init__(self, seed: int = 0, **constraints: Any) -> None:
        torch.manual_seed(seed)
        self.pm = autopar.parallelize(
            Net(), 2, example_inputs=(torch.zeros(8, 8),), **(constraints or {"dp": 2, "zero": 3})
        )
        self.optimizer = torch.optim.AdamW(self.pm.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.steps = 0

    def train(self, steps: int = 1) -> list[float]:
        """The losses of so many steps."""
        losses = []
        for _ in range(steps):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.steps))
            losses.append(float(self.pm.step(*self.pm.shard_batch((batch,)))))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.steps += 1
        return losses

    def save(self, folder: str, **options: Any) -> Any:
        return autopar.save(
            self.pm, self.optimizer, folder, scheduler=self.scheduler, step=self.steps, data=self.steps, **options
        )

    def load(self, folder: str, **options: Any) -> Any:
        return autopar.load(self.pm, self.optimizer, folder, scheduler=self.scheduler, **options)

    def bits(self) -> list[Any]:
        """Everything that loading changes, so that two of them can be compared bit for bit."""
        found: list[Any] = [bytes(torch.get_rng_state().numpy()), repr(self.scheduler.state_dict())]
        groups = self.optimizer.param_groups
        found += [repr({key: value for key, value in group.items() if key != "params"}) for group in groups]
        tensors = [*self.pm.parameters(), *self.pm.buffers()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return found + [local_of(tensor.detach()).clone().contiguous().numpy().tobytes() for tensor in tensors]
