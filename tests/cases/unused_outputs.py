"""A pooler whose output the loss does not read, a layer whose result is detached, and one that only evaluation runs.
Right: exact; none of the three has a gradient, and their values stay."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head, self.pooler = nn.Linear(16, 32), nn.Linear(16, 16)
        self.target, self.evaluated = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)
        if not self.training:
            h = self.evaluated(h)
        apart = (h - self.target(h).detach()).square().mean()
        loss = F.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten()) + apart
        return {"loss": loss, "pooled": torch.tanh(self.pooler(h[:, 0]))}


def model():
    return Model()


def batch(seed):
    return (torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(seed)),)
