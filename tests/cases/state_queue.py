"""A queue of earlier keys with a pointer that is a tensor, as in momentum contrast. Right: exact with one microbatch;
several are refused, since the queue holds rows of the whole batch."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("queue", torch.linspace(-1, 1, 128).reshape(16, 8).sin())
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        q = nn.functional.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            self.key.weight.detach()
            k = nn.functional.normalize(self.key(y), dim=-1)
        near = (q * k).sum(-1, keepdim=True)
        logits = torch.cat([near, q @ self.queue.clone().t()], -1) / 0.2
        with torch.no_grad():
            self.queue[(self.pointer + torch.arange(len(k))) % 16] = k
            self.pointer[0] = (self.pointer[0] + len(k)) % 16
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=g), torch.randn(8, 8, generator=g)


# What a step writes is a function of the whole batch.
IMPOSSIBLE = {"dp2-m2": "needs all rows of the batch at once"}
