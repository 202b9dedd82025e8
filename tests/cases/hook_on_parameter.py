"""A hook on a parameter masks its gradient. Right: refused, with the line of the hook."""

import torch
from torch import nn


def masked(grad):
    return grad * (torch.arange(grad.shape[0]) < 8)[:, None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.a.weight.register_hook(masked)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


REFUSED = "in masked"


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
