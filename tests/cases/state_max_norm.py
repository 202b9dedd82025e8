"""An embedding that renormalises the rows that it reads. Right: exact, or refused with the line."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8, max_norm=1.0), nn.Linear(8, 32)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


def model():
    return Model()


def batch(seed):
    return (torch.randint(32, (8, 4), generator=torch.Generator().manual_seed(seed)),)


REFUSED = "forward writes to the parameter 'embed.weight'"
