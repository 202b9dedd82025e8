"""What several ranks hold is compared bit by bit, and the rank that has other bits is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import AutoparError
from autopar.ir.primitives.read_parameter import local_of
from autopar.training.replicas import Replicas, minority
from tests.harness import run_ranks


@pytest.mark.parametrize(
    ("sums", "odd"),
    [([7, 7, 8], [2]), ([7, 8, 7, 7, 9], [1, 4]), ([7, 8], None), ([7, 7, 8, 8], None), ([7, 8, 9], None)],
)
def test_the_minority_is_odd_and_of_two_none_is(sums: list[int], odd: list[int] | None) -> None:
    assert minority(dict(enumerate(sums))) == odd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def _run(plan: str, faulty: list[int]) -> str:
    """A clean step, then one bit that ranks have flipped; the error that is raised, and whether the first passed."""
    torch.manual_seed(0)
    pm = autopar.parallelize(
        Net(), dist.get_world_size(), example_inputs=(torch.ones(12, 8),), plan=autopar.Plan.from_yaml(plan)
    )
    optimizer = torch.optim.AdamW(pm.parameters())
    try:
        replicas = Replicas(pm)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    for _ in range(3):
        pm.step(pm.shard_batch(torch.randn(12, 8)))
        optimizer.step()
        optimizer.zero_grad()
    replicas.check(3)
    if dist.get_rank() in faulty:
        parameter = next(pm.parameters())
        bits = local_of(parameter.detach()).view(torch.int32).flatten()
        bits[0] ^= 1 << 3
    try:
        replicas.check(6)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "the same"


def _plan(ranks: int, **limits: Any) -> str:
    return autopar.search(Net(), make_cluster("cpu", ranks), example_inputs=(torch.ones(12, 8),), **limits).to_yaml()


@pytest.mark.parametrize(
    ("ranks", "limits", "faulty", "words"),
    [
        (3, {"dp": 3, "zero": 0}, [1], ["step 6: rank 1 has other values of first.", "after step 3", "2 other ranks"]),
        (2, {"dp": 2, "zero": 0}, [1], ["ranks 0, 1 hold the same first.", "Which of them is wrong cannot be told"]),
        (4, {"dp": 2, "pp": 2, "zero": 0}, [3], ["ranks 2, 3 hold the same second."]),
        (4, {"dp": 2, "tp": 2, "zero": 0}, [], ["the same"]),
        (4, {"dp": 4, "zero": 3, "shard": 2}, [2], ["hold the same first.", "Which of them"]),
    ],
)
def test_a_flipped_bit_is_found_and_every_rank_names_it(
    ranks: int, limits: dict[str, Any], faulty: list[int], words: list[str]
) -> None:
    found = run_ranks(_run, ranks, _plan(ranks, **limits), faulty)
    assert len(set(found)) == 1
    for word in words:
        assert word in found[0], found[0]


def test_a_plan_that_holds_nothing_twice_is_refused() -> None:
    for text in run_ranks(_run, 2, _plan(2, dp=2, zero=3), []):
        assert text.startswith("InvalidInput: --check-copies-every") and "ZeRO 0" in text
