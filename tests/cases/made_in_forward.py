"""A layer that the first forward makes. Right: refused, with the line."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        if not hasattr(self, "head"):
            self.head = nn.Linear(h.shape[-1], 1)
        return self.head(h).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


REFUSED = "self.head = nn.Linear(h.shape[-1], 1)"
