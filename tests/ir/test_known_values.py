"""What forward reads of tensors that it makes of constants is a number; of others it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError


class Constants(nn.Module):
    """Branches on a mask that forward makes, and writes to, through views."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 6)
        mask[:, 3:] = 0
        if mask.eq(0).any():
            x = x * 2
        length = int(mask.sum(1).max().item())
        mask[:, :3].zero_()
        if not mask.any():
            x = x + length
        for weight in torch.linspace(0, 1, 3).tolist():
            x = x + weight
        return x.sum() if torch.equal(torch.arange(3), torch.tensor([0, 1, 2])) else x.mean()


class Unknown(nn.Module):
    scale: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4)
        match self.kind:
            case "drawn":
                mask.uniform_()
            case "of an input":
                mask[:2] = x[0, :2]
            case "of a buffer":
                mask = mask * self.scale
            case "of a parameter":
                mask[1:].copy_(self.linear.weight[0, 1:])
        return self.linear(x).sum() if mask.sum() > 1 else x.sum()


def test_values_of_constants_are_known() -> None:
    graph = capture(Constants(), torch.randn(8, 4)).graph
    ops = [(str(n.target).split(".")[1], *n.args[1:]) for n in graph.nodes if n.op == "call_function"]
    assert ops == [("mul", 2), ("add", 3), ("add", 0.5), ("add", 1.0), ("sum",)]


@pytest.mark.parametrize("kind", ["drawn", "of an input", "of a buffer", "of a parameter"])
def test_other_values_are_not(kind: str) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Unknown(kind), torch.randn(8, 4))
