"""An autograd function that gives one of its arguments no gradient, and one that draws random numbers, which come to
nothing. Right: exact; the weights behind that argument have no gradient."""

import torch
from torch import nn


class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2 + y * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept = torch.rand_like(x) < 2.0
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return 0.5 * grad * kept


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = First.apply(self.a(x), self.b(x))
        return self.c(Dropped.apply(h).tanh()).square().mean()


# What is drawn for a row depends on how many rows there are before it.
IMPOSSIBLE = {"dp2-m2": "Dropped needs all rows of the batch at once"}


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
