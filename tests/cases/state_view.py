"""A view of a buffer, made in __init__, is written in forward. Right: refused, with the line."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("means", torch.zeros(4, 8))
        self.first = self.means[0]

    def forward(self, x):
        h = self.linear(x)
        self.first.lerp_(h.detach().mean(0), 0.1)
        return (h - self.means.sum(0)).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


REFUSED = "self.first.lerp_(h.detach().mean(0), 0.1)"
