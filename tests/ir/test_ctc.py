"""The loss of connectionist temporal classification, in all the ways in which its targets may be given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.ops.ctc import ctc_loss_is_one_op

STEPS, SAMPLES, CLASSES, WIDTH = 12, 4, 6, 5
LABELS = torch.tensor([[1, 2, 3, -1, -1], [2, 2, -1, -1, -1], [5, 4, 3, 2, 1], [-1, -1, 3, -1, 1]])
KNOWN = LABELS >= 0
LENGTHS = torch.tensor([12, 12, 11, 9])
GIVEN: dict[str, Callable[[], tuple[Tensor, object, object]]] = {
    "rows": lambda: (LABELS.clamp(min=1), LENGTHS, KNOWN.sum(1)),
    "on a mask": lambda: (LABELS.masked_select(KNOWN), LENGTHS, KNOWN.sum(1)),
    "joined": lambda: (LABELS[KNOWN], LENGTHS, KNOWN.sum(1)),
    "lengths in lists": lambda: (LABELS[KNOWN], LENGTHS.tolist(), KNOWN.sum(1).tolist()),
}


def loss_and_gradient(given: Callable[[], tuple[Tensor, object, object]], reduction: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(STEPS, SAMPLES, CLASSES).requires_grad_()
    targets, *lengths = given()
    loss = F.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction, zero_infinity=True)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", GIVEN)
def test_is_torchs(name: str, reduction: str) -> None:
    expected = loss_and_gradient(GIVEN[name], reduction)
    with ctc_loss_is_one_op():
        found = loss_and_gradient(GIVEN[name], reduction)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_sample_without_a_batch(reduction: str) -> None:
    def loss() -> Tensor:
        torch.manual_seed(0)
        spoken = torch.randn(STEPS, CLASSES).log_softmax(-1)
        return F.ctc_loss(spoken, LABELS[2], torch.tensor(STEPS), torch.tensor(WIDTH), reduction=reduction)

    with ctc_loss_is_one_op():
        found = loss()
    torch.testing.assert_close(found, loss())


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        spoken = self.head(frames).log_softmax(-1).transpose(0, 1)
        known = labels >= 0
        lengths = torch.full((len(labels),), len(spoken)), known.sum(1)
        return F.ctc_loss(spoken, labels.masked_select(known), *lengths)


def test_joined_targets_are_captured_without_the_vector_of_unknown_size() -> None:
    captured = capture(Speech(), (torch.randn(SAMPLES, STEPS, 8), LABELS))
    names = [str(node.target) for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    assert "autopar.ctc_loss.default" in names and not any("masked_select" in name for name in names)
