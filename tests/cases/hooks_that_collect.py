"""Forward hooks that close over the model and collect features, and a function of a layer that does. Right: exact."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4)
        self.scale, self.features = nn.Parameter(torch.ones(8)), {}
        for place, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda module, args, out, place=place: self.features.update({place: out}))
        self.act = lambda x: x.tanh() * self.scale
        plain = self.head.forward
        self.head.forward = lambda x: 2 * plain(x)

    def forward(self, x):
        self.features.clear()
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x).square().mean() + sum(f.square().mean() for f in self.features.values())


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
