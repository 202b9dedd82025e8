"""as_strided is captured as views that give the same elements of tensors that lie otherwise in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError


class Viewed(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = [view]

    def forward(self, x: Tensor) -> Tensor:
        return self.view[0](x)


def chunks_of_transposed(x: Tensor) -> Tensor:
    """Windows of 6 rows, 3 apart, of a transposed tensor."""
    x = x.transpose(0, 1).reshape(4, 6, 4, 5)
    batch, _, rows, width = x.stride()
    return x.as_strided([4, 7, 6, 5], [batch, 3 * rows, rows, width])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda x: x.as_strided([24, 2, 2, 5], [20, 5, 10, 1]),
    "chunks of a transposed tensor": chunks_of_transposed,
    "diagonal": lambda x: x.as_strided([24, 4], [20, 6]),
    "part": lambda x: x.as_strided([12, 2, 1, 2], [40, 5, 3, 2], 6),
    "expanded": lambda x: x.as_strided([24, 3, 5], [20, 0, 1], 5),
    "slice": lambda x: x[:, 1:3].as_strided([24, 2, 5], [20, 5, 1]),
}


@pytest.mark.parametrize("name", list(VIEWS))
def test_views_give_the_same_elements(name: str) -> None:
    x = torch.arange(480.0).view(24, 4, 5)
    captured = capture(Viewed(VIEWS[name]), x)
    assert not any("as_strided" in str(node.target) for node in captured.graph.nodes)
    module = torch.fx.GraphModule(nn.Module(), captured.graph)
    elsewhere = torch.empty(5, 24, 4).permute(1, 2, 0).copy_(x)
    for given in (x, elsewhere):
        torch.testing.assert_close(module(given)[0], VIEWS[name](x), rtol=0, atol=0)


def test_what_is_no_window_is_refused() -> None:
    with pytest.raises(CaptureError, match="is no window of its dimensions"):
        capture(Viewed(lambda x: x.transpose(0, 1).as_strided([24, 7], [20, 3])), torch.randn(24, 4, 5))
