"""Right: batch norms of a convolutional net use their running statistics in eval mode, and dropout of channels is off.

In eval mode the rows of a batch are independent, so microbatches and pipelines that training cannot have are no matter
here: the plan is that of training.
"""

import torch
from torch import nn
from torch.nn import functional as F

EVALUATES = True
IMPOSSIBLE = {"dp2-m2": "microbatches"}  # training normalises over all rows of a batch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 5)
        # Statistics that are those of no batch.
        for number, block in enumerate(self.blocks):
            block[1].running_mean.fill_(0.1 * number)
            block[1].running_var.fill_(1.5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.dropout(x.mean((2, 3)), 0.4, self.training))


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),)


def target(seed):
    return torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(seed))


def loss_fn(output, target):
    return F.cross_entropy(output, target)
