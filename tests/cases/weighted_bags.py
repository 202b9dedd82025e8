"""Bags with learned factors of their rows and a row that does not count, given flat with regular offsets; words that
are bags of pieces; and a maximum. Right: exact with rows of the batch divided, and with microbatches."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(40, 8, mode="sum", padding_idx=0)
        self.pieces = nn.EmbeddingBag(40, 8, mode="mean", padding_idx=0)
        self.best = nn.EmbeddingBag(40, 8, mode="max", padding_idx=0)
        self.importance = nn.Embedding(40, 1)
        self.head = nn.Linear(24, 2)

    def forward(self, ids, words, y):
        rows, length = ids.shape
        scale = torch.sigmoid(self.importance(ids)).flatten()
        starts = torch.arange(0, rows * length, length, device=ids.device)
        of_bag = self.table(ids.flatten(), starts, per_sample_weights=scale)
        of_words = self.pieces(words.flatten(0, 1)).view(rows, -1, 8).amax(1)
        return nn.functional.mse_loss(self.head(torch.cat([of_bag, of_words, self.best(ids)], -1)), y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(40, (8, 6), generator=g),
        torch.randint(40, (8, 3, 4), generator=g),
        torch.randn(8, 2, generator=g),
    )
