"""Right: after `pm.eval()`, `pm(x)` under no_grad equals the plain model in eval mode, twice the same, and no buffer
moves; after `pm.train()` training goes on as if nothing had been evaluated."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x):
        return self.net(x)


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


EVALUATES = True
IMPOSSIBLE = {"dp2-m2": "microbatches"}  # training normalises over all rows of a batch


def loss_fn(output, target):
    return (output - target).square().mean()


def target(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 + seed))
