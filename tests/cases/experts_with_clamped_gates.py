"""A mixture of experts whose gate and value take turns in one matrix and are clamped. Right: exact, under expert
parallelism too; the inner width of the experts divides."""

import torch
from torch import nn
from transformers.integrations.moe import _grouped_mm as grouped_product

WIDTH, INNER, EXPERTS, CHOSEN = 8, 8, 4, 2


def between(up):
    gate, value = up[..., ::2].clamp(max=0.5), up[..., 1::2].clamp(-0.5, 0.5)
    return (value + 1) * (gate * torch.sigmoid(1.702 * gate))


class Experts(nn.Module):
    """Rows sorted by expert, grouped products, and the way back; ``between`` lies between the products."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 4)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(x, rows)
        chosen, order = index.reshape(-1).sort()
        ends = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        up = grouped_product(rows[order // CHOSEN], self.up, ends) + self.up_bias[chosen]
        down = grouped_product(self.between(up), self.down, ends) + self.down_bias[chosen]
        down = down * weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return x + down[inverse].view(-1, CHOSEN, WIDTH).sum(1).view(x.shape)

    def route(self, x, rows):
        scores, index = self.router(x).topk(CHOSEN, -1)
        return scores.softmax(-1), index


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Experts(between) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def model():
    return Model()


def batch(seed):
    return (torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(seed)),)
