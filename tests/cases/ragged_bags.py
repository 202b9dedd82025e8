"""Bags of any sizes beside dense features: all indices in a row, and where each bag begins from the sizes. Right:
exact; bags that depend on all before them are not cut into microbatches."""

import torch
from torch import nn

IMPOSSIBLE = {"dp2-m2": "needs all rows of the batch at once"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 8)
        self.tables = nn.ModuleList(nn.EmbeddingBag(64, 8, mode=mode) for mode in ("sum", "mean"))
        self.top = nn.Linear(24, 1)

    def forward(self, dense, sizes, ids, y):
        starts, ids = sizes.cumsum(0) - sizes, ids.flatten()
        h = torch.cat([self.dense(dense).relu(), *(table(ids, starts) for table in self.tables)], -1)
        return nn.functional.binary_cross_entropy_with_logits(self.top(h)[:, 0], y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(8, 4, generator=g),
        torch.randint(4, (8,), generator=g),
        torch.randint(64, (8, 3), generator=g),
        torch.randint(2, (8,), generator=g).float(),
    )
