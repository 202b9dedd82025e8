"""A layer that forward never calls, as a pooler or a spare head. Right: exact under every plan, ZeRO-1 to 3 included;
the layer keeps its value and is in the state dict."""

import torch
from torch import nn

IMPOSSIBLE = {"pp2": "no configuration"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.spare = nn.Linear(8, 8), nn.Linear(16, 6)

    def forward(self, x):
        return self.linear(x).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
