"""Means in a dictionary and a list of the module, moved in forward. Right: exact, or refused with the entry's line."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.means = {"all": torch.zeros(8)}

    def forward(self, x):
        h = self.linear(x)
        self.means["all"] = 0.9 * self.means["all"] + 0.1 * h.detach().mean(0)
        return (h - self.means["all"]).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)


REFUSED = """self.means["all"] = 0.9"""
