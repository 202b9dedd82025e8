"""Hooks on activations: one that limits each row's gradient, one registered after the tensor was used, in repeated
layers. Right: exact."""

import torch
from torch import nn


def limit(grad):
    return grad * (0.01 / grad.norm(dim=-1, keepdim=True)).clamp(max=1.0)


class Layer(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), scale

    def forward(self, x):
        h = self.linear(x)
        out = x + h.tanh()
        h.register_hook(lambda grad: grad * self.scale)
        out.register_hook(limit)
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.layers, self.b = nn.Linear(8, 16), nn.ModuleList(Layer(0.5) for _ in range(5)), nn.Linear(16, 4)

    def forward(self, x, y):
        h = self.a(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.b(h), y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=g), torch.randint(4, (8,), generator=g)
