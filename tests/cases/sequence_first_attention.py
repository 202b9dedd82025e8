"""``nn.MultiheadAttention`` between two sequences, the sequence first, with other widths of keys and values, a bias for
each query and key, and its weights used. Right: exact with rows of the batch divided, microbatches and pipelines."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 1, 32) * 0.2)
        self.inner = nn.MultiheadAttention(24, 2, dropout=0.0, bias=False)
        self.cross = nn.MultiheadAttention(32, 4, dropout=0.0, kdim=24, vdim=24)
        self.bias = nn.Parameter(torch.randn(9, 9) * 0.1)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(32, 3)

    def forward(self, x, y):
        x = x.transpose(0, 1)
        x = x + self.inner(*[self.norm(x)] * 3, need_weights=False, attn_mask=self.bias)[0]
        out, weights = self.cross(self.queries.expand(-1, x.shape[1], -1), x, x)
        sharpness = weights.square().sum(-1).mean()
        return nn.functional.mse_loss(self.head(out).transpose(0, 1), y) - 0.1 * sharpness


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 9, 24, generator=g), torch.randn(8, 5, 3, generator=g)
