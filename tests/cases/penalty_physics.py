"""Forces as the slope of an energy, of a system of particles, with a derivative by time of a second order; and a
penalty on the gradient of a loss by a weight. Right: exact; the last needs the whole batch."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        self.clock = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def energy(self, places):
        distances = (places[:, :, None] - places[:, None]).square().sum(-1)
        features = torch.stack((distances, distances.sin(), torch.exp(-distances)), -1)
        return self.last(self.norm(self.first(features)).sigmoid()).sum((1, 2, 3))

    def forward(self, places, forces, times):
        places = places.clone().requires_grad_()
        energy = self.energy(places)
        found = -torch.autograd.grad(energy, places, torch.ones_like(energy), create_graph=self.training)[0]
        times = times.requires_grad_(True)
        signal = self.clock(times)
        speed = torch.autograd.grad(signal.sum(), times, create_graph=True)[0]
        acceleration = torch.autograd.grad(speed.sum(), times, create_graph=True)[0]
        residual = (acceleration + signal).square().mean()
        fixed = torch.autograd.grad(residual, times, retain_graph=True)[0]
        (by_weight,) = torch.autograd.grad(residual, self.clock[2].weight, create_graph=True)
        return (found - forces).square().mean() + residual + 0.1 * by_weight.square().sum() + (fixed * signal).mean()


IMPOSSIBLE = {"dp2-m2": "needs a sum over the whole batch"}


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, 3, generator=g), torch.randn(8, 4, 3, generator=g), torch.rand(8, 1, generator=g)
