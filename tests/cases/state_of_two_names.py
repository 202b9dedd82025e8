"""A buffer that several layers share and move, under a name in each. Right: exact; the state dict has all the names."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", mean)

    def forward(self, x):
        h = self.linear(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        return (h - self.mean).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        mean = torch.zeros(8)
        self.layers, self.head = nn.ModuleList(Layer(mean) for _ in range(5)), nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


# What a step writes is a function of the whole batch.
IMPOSSIBLE = {"dp2-m2": "needs a sum over the whole batch"}
