"""The user checkpoints: without reentrance, in sequence, reentrantly on a step input, which leaves the layer without
gradients, and a span whose saved tensors go to the CPU. Right: exact; what is kept is the plan's to say."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.stack = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.last, self.drop = nn.Linear(8, 4), nn.Dropout(0.0)

    def forward(self, x):
        h = checkpoint(self.first, x, use_reentrant=True) + self.stack[0](x)
        h = checkpoint_sequential(self.stack, 2, h, use_reentrant=False)
        h = checkpoint(lambda a, scale: self.drop(scale * a).tanh(), h, scale=2.0, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            return self.last(h).square().mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
