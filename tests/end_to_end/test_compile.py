"""``compile=True``: the same numbers, and as many compilations for eight blocks as for three."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.end_to_end.stacks import batch, stack
from tests.harness import run_ranks


def _train(compiled: bool, depth: int, constraints: dict[str, Any]) -> dict[str, Any]:
    # Rank processes have no use for a pool of compiler processes each.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    ranks = torch.distributed.get_world_size()
    parallel = autopar.parallelize(stack(depth=depth), ranks, example_inputs=batch(), compile=compiled, **constraints)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(float(parallel.step(**parallel.shard_batch(batch(step)))))
        optimizer.step()
    counted: dict[str, Any] = {}
    if compiled:
        from torch._dynamo.utils import counters

        counted = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
    return {"losses": losses, "state": parallel.full_state_dict(), **counted}


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints",
    [{"tp": 2, "sp": True}, {"dp": 2, "zero": 3, "remat": "full"}, {"dp": 2, "zero": 0, "remat": "selective"}],
    ids=str,
)
def test_the_same_training_with_as_many_compilations_for_more_blocks(constraints: dict[str, Any]) -> None:
    eager = run_ranks(_train, 2, False, 3, constraints)[0]
    for result in run_ranks(_train, 2, True, 3, constraints):
        torch.testing.assert_close(result["losses"], eager["losses"], rtol=1e-6, atol=0)
        torch.testing.assert_close(result["state"], eager["state"], rtol=1e-4, atol=1e-6)
        assert not result["breaks"]
        graphs = result["graphs"]
    deeper = run_ranks(_train, 2, True, 8, constraints)[0]
    assert deeper["graphs"] == graphs


# Three graphs of a block, where a whole backward has one that torch cuts in two.
_SPLIT = [
    ("zb-h1", 2, {"pp": 2, "num_microbatches": 4, "remat": "selective"}),
    ("zb-v", 2, {"pp": 2, "num_microbatches": 2, "remat": "none"}),
    ("dualpipe-v", 2, {"pp": 2, "num_microbatches": 4, "remat": "alternate"}),
    ("zb-h1", 4, {"pp": 2, "dp": 2, "zero": 3, "num_microbatches": 2, "remat": "full"}),
    ("zb-2p", 4, {"pp": 2, "tp": 2, "sp": True, "num_microbatches": 4, "remat": "selective"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks", "constraints"), _SPLIT, ids=str)
def test_the_same_training_under_a_split_backward(schedule: str, ranks: int, constraints: dict[str, Any]) -> None:
    constraints = {**constraints, "schedule": schedule}
    eager = run_ranks(_train, ranks, False, 4, constraints)[0]
    results = run_ranks(_train, ranks, True, 4, constraints)
    deeper = run_ranks(_train, ranks, True, 8, constraints)
    for result, more in zip(results, deeper, strict=True):
        torch.testing.assert_close(result["losses"], eager["losses"], rtol=1e-6, atol=0)
        torch.testing.assert_close(result["state"], eager["state"], rtol=1e-4, atol=1e-6)
        assert not result["breaks"]
        assert 0 < more["graphs"] <= 3 * 3, "of the embedding, a block and the head; stages are cut elsewhere"


def test_one_rank() -> None:
    eager, compiled = (run_ranks(_train, 1, flag, 2, {})[0] for flag in (False, True))
    torch.testing.assert_close(compiled["losses"], eager["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(compiled["state"], eager["state"], rtol=1e-4, atol=1e-6)
    assert 0 < compiled["graphs"] <= 4


class _Wide(nn.Module):
    """Layers large enough that dividing their backward pays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _schedule(compiled: bool) -> str:
    constraints = {"pp": 2, "num_microbatches": 4}
    parallel = autopar.parallelize(
        _Wide(), 2, example_inputs={"x": torch.randn(512, 512)}, compile=compiled, **constraints
    )
    return parallel.plan.schedule


@pytest.mark.parametrize("compiled", [False, True])
def test_a_schedule_that_divides_the_backward_is_chosen(compiled: bool) -> None:
    assert set(run_ranks(_schedule, 2, compiled)) <= {"zb-h1", "zb-2p", "zb-v", "dualpipe-v"}
