"""The nodes of a graph are the rows of the batch; its edges are not, and every rank needs all of them. Exact, in one
microbatch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NODES, EDGES = 16, 24
IMPOSSIBLE = {"dp2-m2": "needs all rows of the batch at once"}


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(self.enter(x))
        received = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * weights.unsqueeze(-1))
        return F.cross_entropy(self.leave(h + received), labels)


def model() -> nn.Module:
    return Convolution()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(NODES, 6, generator=generator),
        "edges": torch.randint(0, NODES, (2, EDGES), generator=generator),
        "weights": torch.rand(EDGES, generator=generator),
        "labels": torch.randint(0, 4, (NODES,), generator=generator),
    }
