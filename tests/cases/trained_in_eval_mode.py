"""Right: a model that is handed over in eval mode, and that nobody calls ``train()`` on, takes its steps in eval mode,
as it does in torch: no dropout, batch norms read their running statistics."""

import torch
from torch import nn
from torch.nn import functional as F

# The plan is made for train mode, which normalises over all rows of a batch.
IMPOSSIBLE = {"dp2-m2": "microbatches"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3),
        )  # fmt: skip

    def forward(self, x, y):
        return {"loss": F.cross_entropy(self.net(x), y)}


def model():
    return Model().eval()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)
