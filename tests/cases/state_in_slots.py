"""A counter in an object with slots, which a global variable holds, decides the loss. Right: refused with its line."""

import dataclasses

import torch
from torch import nn


@dataclasses.dataclass(slots=True)
class Progress:
    steps: int = 0


PROGRESS = Progress()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        PROGRESS.steps += 1
        return self.linear(x).square().mean() / PROGRESS.steps


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


REFUSED = "in forward: PROGRESS.steps += 1"
