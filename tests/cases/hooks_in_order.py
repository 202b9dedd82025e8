"""Two hooks on one activation, which do not commute, with a use before them and one between, and a gradient by it that
is taken in forward. Right: exact; the first that was registered gets the gradient first."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x)
        doubled = h * 2
        h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        y = self.b(h)
        h.register_hook(lambda grad: 100 * grad)
        loss = self.c(y.tanh()).square().mean() + doubled.square().mean()
        (slope,) = torch.autograd.grad(loss, h, retain_graph=True)
        return loss + (slope * h).mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
