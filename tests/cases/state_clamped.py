"""A critic whose weights are clamped in forward, as in Wasserstein GANs. Right: exact, or refused with the line."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        return self.second(self.first(x).relu()).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


REFUSED = "parameter.data.clamp_(-0.2, 0.2)"
