"""Noise and times of a flow, drawn by their sizes alone, read in the first layer and by the loss. Right: exact; what
depends on the noise cancels, provided that all who read it read the same."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 4)

    def forward(self, x):
        time, noise = torch.rand(len(x), 1), torch.randn(x.shape)
        mixed = time * x + (1 - time) * noise
        h = x
        for layer in self.layers:
            h = layer(h).tanh() + 0 * mixed
        return self.head(h).square().mean() + 100 * (mixed - time * x - (1 - time) * noise).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
