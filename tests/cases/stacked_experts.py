"""Experts as stacks of matrices that all compute every token, weighted by a router (Llama 4's way). Right: exact; an
axis for experts divides the stacks, and the batch elsewhere. Copies of all rows, one after another, are not cut into
microbatches."""

import torch
from torch import nn


class MixtureOfExperts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        score = self.router(rows).softmax(-1)
        routed = rows.repeat(score.shape[1], 1) * score.transpose(0, 1).reshape(-1, 1)
        gate, value = torch.bmm(routed.view(score.shape[1], -1, x.shape[-1]), self.up).chunk(2, dim=-1)
        out = torch.bmm(nn.functional.silu(gate) * value, self.down)
        return x + out.sum(0).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(MixtureOfExperts(8, 4) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, tokens, targets):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


IMPOSSIBLE = {"dp2-m2": "needs all rows of the batch at once"}


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(32, (8, 6), generator=g), torch.randint(32, (8, 6), generator=g)
