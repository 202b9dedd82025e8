"""A frozen tower under a trained one, biases alone trained in the last layer, and a frozen embedding.
Right: exact; what is frozen has no gradient, and a pipeline may cut inside the tower."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.tower = nn.ModuleList(Layer() for _ in range(3))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 32)
        self.embed.requires_grad_(False)
        self.tower.requires_grad_(False)
        for name, parameter in self.layers[-1].named_parameters():
            parameter.requires_grad_(name.endswith("bias"))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in (*self.tower, *self.layers):
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def model():
    return Model()


def batch(seed):
    return (torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(seed)),)
