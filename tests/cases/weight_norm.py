"""Weights scaled to learned norms of their slices, of a convolution and of linear layers, in two spellings. Right:
exact; a search that tries the op in parts leaves the process whole."""

import warnings

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.conv = norm(nn.Conv1d(4, 16, 3, padding=1))
        self.up = norm(nn.Linear(16, 32))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.down = nn.utils.weight_norm(nn.Linear(32, 8), dim=1)

    def forward(self, x, y):
        h = self.conv(x).relu().mean(-1)
        return nn.functional.mse_loss(self.down(self.up(h).relu()), y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, 6, generator=g), torch.randn(8, 8, generator=g)
