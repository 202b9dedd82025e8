"""A counter in Python decides the loss. Right: refused, naming the attribute and its line."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), 0

    def forward(self, x):
        self.count += 1
        return self.linear(x).square().mean() / self.count


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


REFUSED = "state_python.py:13 in forward: self.count += 1"
