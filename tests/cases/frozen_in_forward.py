"""A critic that is frozen for one of two calls in forward. Right: refused, with the line that freezes it."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        made = self.maker(x)
        self.critic.requires_grad_(False)
        fooled = self.critic(made).mean()
        self.critic.requires_grad_(True)
        return self.critic(made.detach()).square().mean() - fooled


REFUSED = "self.critic.requires_grad_(False)"


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
