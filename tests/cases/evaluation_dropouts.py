"""Ops that draw in training alone: kinds of dropout, slopes of rectifiers, layers left out (stochastic depth)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EVALUATES = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Sequential(nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.RReLU(), nn.Dropout2d(0.2))

    def forward(self, x: Tensor) -> Tensor:
        new = self.drop(self.conv(x))
        if self.training:
            new = new * (0.8 + torch.rand(x.shape[0], 1, 1, 1)).floor() / 0.8
        return x + new


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.blocks(x).flatten(1))
        return {"loss": F.cross_entropy(scores, y), "scores": scores}


def model() -> nn.Module:
    return Model()


def batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 4, 4, 4, generator=generator), "y": torch.randint(5, (8,), generator=generator)}
