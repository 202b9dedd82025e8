"""Python loops over the steps of a longer sequence: a selective state space, whose outputs are written in place, and a
cell. Right: each is one op; exact with rows of the batch and channels divided, microbatches and pipelines."""

import torch
from torch import nn


class Selective(nn.Module):
    def __init__(self, width, states):
        super().__init__()
        self.states = states
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.select = nn.Linear(width, 2 * states + 1)
        self.rate = nn.Parameter(torch.rand(width, states).log())
        self.out = nn.Linear(width, width)

    def forward(self, x):
        h, gate = self.into(self.norm(x)).chunk(2, -1)
        b, c, step = self.select(h).split([self.states, self.states, 1], -1)
        step = nn.functional.softplus(step)
        decay = torch.exp(-step[..., None] * self.rate.exp())
        inputs = (step * h)[..., None] * b[:, :, None, :]
        state, seen = torch.zeros_like(inputs[:, 0]), torch.empty_like(h)
        for number in range(x.shape[1]):
            state = decay[:, number] * state + inputs[:, number]
            seen[:, number] = (state @ c[:, number, :, None])[..., 0]
        return x + self.out(seen * nn.functional.silu(gate))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.first, self.second = Selective(8, 4), Selective(8, 4)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens, targets):
        h = self.second(self.first(self.embed(tokens)))
        state, seen = torch.zeros_like(h[:, 0]), []
        for row in h.flip(1).unbind(1):
            state = self.cell(row, state)
            seen.append(state)
        return nn.functional.cross_entropy(self.head(torch.stack(seen, 1)).flatten(0, 1), targets.flatten())


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(32, (8, 20), generator=g), torch.randint(32, (8, 20), generator=g)
