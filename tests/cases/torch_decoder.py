"""torch's own encoder and decoder with their sequence first, a causal mask and padded memory. Right: exact under
pipelines, microbatches and tensor parallelism."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(64, 32, padding_idx=0), nn.Parameter(torch.randn(12, 1, 32) * 0.1)
        self.body = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, activation="gelu", norm_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, source, target):
        padding = source == 0
        memory_in = self.embed(source.t()) + self.position
        h = self.embed(target[:, :-1].t()) + self.position[: target.shape[1] - 1]
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[0], device=h.device)
        h = self.body(
            memory_in,
            h,
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), target[:, 1:].t().flatten())


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    source = torch.randint(1, 64, (8, 12), generator=g)
    source[::2, 9:] = 0
    return source, torch.randint(1, 64, (8, 11), generator=g)
