"""A learned weighting of the loss and a penalty on weights. Right: exact with microbatches and pipelines; what reads
no batch is counted once."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.weight = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x, y):
        loss = nn.functional.cross_entropy(self.b(self.a(x).relu()), y)
        return loss * torch.exp(-self.weight) + self.weight + 1e-2 * self.a.weight.square().sum()


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=g), torch.randint(4, (8,), generator=g)
