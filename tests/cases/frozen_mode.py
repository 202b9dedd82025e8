"""Right: a submodule that is in eval mode when the model is handed over stays so when the rest trains: its batch norm
reads running statistics and never moves them, and its dropout is off."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, x, y):
        return F.mse_loss(self.head(self.body(self.tower(x))), y)


def model():
    built = Model()
    built.tower[1].running_mean.fill_(0.3)
    built.tower.eval()
    return built


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)
