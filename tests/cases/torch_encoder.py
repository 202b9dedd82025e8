"""torch's own encoder layers. Right: exact under pipelines, microbatches and tensor parallelism; data parallelism
moves no activation."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens, targets):
        h = self.encoder(self.embed(tokens))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(64, (8, 16), generator=g), torch.randint(64, (8, 16), generator=g)
