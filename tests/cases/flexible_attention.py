"""``flex_attention`` with grouped heads, a learned bias and a sliding mask. torch has no backward of it on a CPU, so
that one process runs the formula; what is captured is ``flex_attention`` itself. Right: exact."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WINDOW = 5


def sliding(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, 4))

    def biased(self, score, b, h, q, k):
        return score + self.slopes[h] * (k - q)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (layer(x).view(rows, length, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if torch.compiler.is_exporting():
            mask = create_block_mask(sliding, None, None, length, length, device=x.device)
            h = flex_attention(q, k, v, score_mod=self.biased, block_mask=mask, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            places = torch.arange(length)
            scores = q @ k.transpose(-1, -2) / 8**0.5 + self.slopes[:, None, None] * (places - places[:, None])
            seen = sliding(None, None, places[:, None], places)
            h = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return x + self.out(h.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(8, 32), nn.ModuleList([Layer(), Layer()]), nn.Linear(32, 4)

    def forward(self, x, y):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, 8, generator=g), torch.randint(4, (8, 16), generator=g)
