"""Unused parameters: in every layer, a whole block, frozen, of odd shapes, without dimensions, without elements.
Right: exact; all of them keep their values and are in the state dict."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 5)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gate * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.never = Layer()
        self.original = nn.Linear(8, 8).requires_grad_(False)
        self.odd, self.scalar = nn.Parameter(torch.randn(3, 5, 7)), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
