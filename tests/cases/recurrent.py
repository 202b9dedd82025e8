"""Recurrent layers. Right: exact with microbatches and pipelines; batch rows divided; FLOPs counted (a plan's
prediction for width 512, 128 steps and batch 64 holds about 206 GFLOP of matrix products a step, forward and
backward)."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.lstm, self.gru = nn.LSTM(width, width, 2, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 64)

    def forward(self, tokens, targets):
        h, _ = self.lstm(self.embed(tokens))
        h, _ = self.gru(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(64, (8, 16), generator=g), torch.randint(64, (8, 16), generator=g)
