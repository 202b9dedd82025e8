"""A selective state space written twice: as a Python loop over the steps and as an associative scan of the same
recurrence. Right: exact with rows of the batch divided, microbatches and pipelines."""

import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan


def combine(first, second):
    return first[0] * second[0], first[1] * second[0] + second[1]


class Block(nn.Module):
    def __init__(self, width, states, scanned):
        super().__init__()
        self.scanned, self.states = scanned, states
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
        if self.scanned:
            states = associative_scan(combine, (decay, inputs), dim=1, combine_mode="generic")[1]
        else:
            state, seen = torch.zeros_like(inputs[:, 0]), []
            for number in range(x.shape[1]):
                state = decay[:, number] * state + inputs[:, number]
                seen.append(state)
            states = torch.stack(seen, 1)
        return x + self.out((states * c[:, :, None, :]).sum(-1) * nn.functional.silu(gate))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block(8, 3, scanned) for scanned in (False, True))
        self.head = nn.Linear(8, 32)

    def forward(self, tokens, targets):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(32, (8, 6), generator=g), torch.randint(32, (8, 6), generator=g)
