"""A small model, captured once a process."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise


class Net(nn.Module):
    """Four equal blocks on rows of 16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def captured_net() -> CapturedModel:
    """``Net`` on 8 rows."""
    with torch.device("meta"):
        return normalise(capture(Net(), (torch.zeros(8, 16),), name="net"))
