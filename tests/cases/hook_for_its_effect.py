"""A hook that only keeps a gradient. Right: refused, with the line that registers it."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(8, 16), nn.Linear(16, 4), []

    def forward(self, x):
        h = self.a(x).relu()
        h.register_hook(self.seen.append)
        return self.b(h).square().mean()


REFUSED = "h.register_hook(self.seen.append)"


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
