"""Recurrent cells stepped by a Python loop, each kind once, with a gate written out. Right: exact with rows of the
batch divided, microbatches and pipelines."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.gated = nn.RNNCell(6, 10, nonlinearity="relu"), nn.GRUCell(10, 10)
        self.memory, self.mix = nn.LSTMCell(10, 8), nn.Linear(18, 10)
        self.head = nn.Linear(8, 1)

    def forward(self, x, y):
        a, b = x.new_zeros(x.shape[0], 10), x.new_zeros(x.shape[0], 10)
        h, c = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in range(x.shape[1]):
            a = self.plain(x[:, step], a)
            b = self.gated(a, b)
            h, c = self.memory(torch.sigmoid(self.mix(torch.cat([b, h], -1))) * b, (h, c))
            outputs.append(self.head(h)[:, 0])
        return nn.functional.mse_loss(torch.stack(outputs, 1), y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, 6, generator=g), torch.randn(8, 5, generator=g)
