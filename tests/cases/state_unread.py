"""A counter and a log that nothing reads, and a table that the first call makes. Right: exact."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls, self.log, self.table = 0, {"loss": []}, None

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(16).cos()
        h = self.second((self.first(x) * self.table).relu())
        loss = self.third(h.relu()).square().mean()
        self.log["loss"].append(loss.detach())
        return loss


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
