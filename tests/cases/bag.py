"""Embedding bags, as in recommendation models. Right: exact with rows of the batch divided, and with microbatches;
tables can be split by rows and by columns."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(64, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.head = nn.Linear(24, 1)

    def forward(self, ids, y):
        h = torch.cat([bag(ids) for bag in self.bags], -1)
        return nn.functional.binary_cross_entropy_with_logits(self.head(h)[:, 0], y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(64, (8, 5), generator=g), torch.randint(2, (8,), generator=g).float()
