"""Running sums and means that the loss reads only in the next step, and statistics of an instance norm. Right: exact;
with microbatches, each adds its part."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x):
        h = self.first(x) - self.mean.clone()
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        y = self.norm(self.second(h.relu()).view(-1, 4, 2)).view(-1, 8)
        bias = 0.01 * (self.load - self.load.mean()).sign()
        self.load = self.load + torch.softmax(y.detach(), -1).sum(0)
        return (y * (1 + bias)).square().mean() + h.square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
