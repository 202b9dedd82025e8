"""Weights with a prior: each step draws none, but pays their divergence from it, and a hinge on it. Right: exact with
microbatches and pipelines; the divergence reads no batch and is counted once."""

import torch
from torch import nn


class Gaussian(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.log_scale = nn.Parameter(torch.full((outputs, inputs), -2.0))

    def divergence(self):
        return (0.5 * (self.mean**2 + (2 * self.log_scale).exp()) - self.log_scale - 0.5).sum()

    def forward(self, x):
        mean = nn.functional.linear(x, self.mean)
        return mean / (1 + nn.functional.linear(x**2, (2 * self.log_scale).exp())).sqrt()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Gaussian(8, 16), Gaussian(16, 1)

    def forward(self, x, y):
        error = nn.functional.mse_loss(self.b(self.a(x).relu())[:, 0], y)
        divergence = self.a.divergence() + self.b.divergence()
        return 2.0 * error + 1e-3 * torch.clamp(divergence - 10.0, min=0.0) - 1.0


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=g), torch.randn(8, generator=g)
