"""A mean over what counts is that of the whole batch, however the batch is cut and whatever each part counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.errors import InfeasiblePlan
from tests.harness import run_ranks

ROWS, SEQ, WIDTH, CLASSES = 8, 4, 8, 12


def _weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weights, label_smoothing=0.1)


def _shifted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _masked(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    mask = targets != -100
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (losses * mask).sum() / mask.sum()


def _nested(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Each token weighted by its deviation from the mean target: a sum over the batch made of another."""
    mask = (targets != -100).float()
    mean = (targets * mask).sum() / mask.sum()
    importance = (targets - mean).square() * mask
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(mask)
    return (losses * importance / importance.sum()).sum()


def _of_outputs(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Pseudo labels: how many count depends on the parameters."""
    confident = logits.softmax(-1).amax(-1) > 0.1
    return F.cross_entropy(logits.flatten(0, 1), logits.argmax(-1).where(confident, -100).flatten())


LOSSES = {"weighted": _weighted, "shifted": _shifted, "masked": _masked, "nested": _nested}


class Net(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weights", torch.linspace(0.2, 3, CLASSES))
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.inner:
            x = x + F.gelu(layer(x))
        return self.loss(self.head(x), targets, self.weights)


def _net(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Net:
    torch.manual_seed(0)
    return Net(loss)


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, CLASSES, (ROWS, SEQ), generator=generator) for _ in range(2))
    # From one target in the first rows to all in the last; none at all in the second pair of rows.
    targets[0] = targets[2:4] = -100
    targets[1, 1:] = -100
    targets[5, :2] = -100
    return {"tokens": tokens, "targets": targets}


def _losses_and_gradients(constraints: dict[str, Any]) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    found = {}
    for name, loss in LOSSES.items():
        pm = autopar.parallelize(_net(loss), dist.get_world_size(), example_inputs=_batch(), **constraints)
        pm.step(**pm.shard_batch(_batch()))
        pm.zero_grad()
        found[name] = pm.step(**pm.shard_batch(_batch())), pm.full_gradients()
    return found


PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{"num_microbatches": 4}],
    2: [
        {"dp": 2, "num_microbatches": 4},
        {"dp": 2, "zero": 3, "num_microbatches": 2},
        {"pp": 2, "num_microbatches": 4},
        {"pp": 2, "num_microbatches": 4, "schedule": "zb-v", "virtual_stages": 2},
        {"tp": 2, "num_microbatches": 2},
    ],
}


def _under_each(plans: list[dict[str, Any]]) -> list[dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    return [_losses_and_gradients(constraints) for constraints in plans]


@pytest.mark.parametrize("ranks", PLANS)
def test_means_over_unequal_counts(ranks: int) -> None:
    expected = {}
    for name, loss in LOSSES.items():
        net = _net(loss)
        value = net(**_batch())
        value.backward()
        expected[name] = value.detach(), {key: p.grad for key, p in net.named_parameters()}
    for rank in run_ranks(_under_each, ranks, PLANS[ranks]):
        for constraints, found in zip(PLANS[ranks], rank, strict=True):
            for name, (value, gradients) in found.items():
                where = f"{name} under {constraints}"
                torch.testing.assert_close(value, expected[name][0], rtol=1e-5, atol=1e-6, msg=where)
                for key, gradient in gradients.items():
                    torch.testing.assert_close(gradient, expected[name][1][key], rtol=1e-4, atol=1e-6, msg=where + key)


def _refused() -> str:
    with pytest.raises(InfeasiblePlan) as refusal:
        autopar.parallelize(_net(_of_outputs), 1, example_inputs=_batch(), num_microbatches=4)
    autopar.parallelize(_net(_of_outputs), 1, example_inputs=_batch(), num_microbatches=1)
    return str(refusal.value)


def test_a_count_that_depends_on_parameters_is_refused() -> None:
    (message,) = run_ranks(_refused, 1)
    assert "microbatches" in message and "needs a sum over the whole batch" in message
