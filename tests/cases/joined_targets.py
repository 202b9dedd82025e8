"""Speech with the loss of connectionist temporal classification: its targets are joined on a mask, or have rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(8, 16, 3, padding=1)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, waves: Tensor, labels: Tensor) -> Tensor:
        frames = torch.tanh(self.frames(waves)).transpose(1, 2)
        spoken = torch.log_softmax(self.head(torch.relu(self.layer(frames))), dim=-1).transpose(0, 1)
        known = labels >= 0
        lengths = torch.full((len(labels),), len(spoken)), known.sum(-1)
        joined = F.ctc_loss(spoken, labels.masked_select(known), *lengths, blank=9)
        rows = F.ctc_loss(spoken, labels.clamp(min=0), *lengths, blank=9, reduction="sum", zero_infinity=True)
        return joined + rows / len(labels)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Speech()


def batch(seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 9, (8, 6), generator=generator)
    labels[torch.rand(8, 6, generator=generator) < 0.3] = -100
    return torch.randn(8, 8, 20, generator=generator), labels
