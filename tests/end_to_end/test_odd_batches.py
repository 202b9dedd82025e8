"""Plans for batches that divide into no equal microbatches: steps equal those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import InfeasiblePlan
from autopar.planning import find_plan
from autopar.search.problem.constraints import Constraints
from tests.end_to_end.test_other_sizes import CASES, batch_of, errors_of_steps
from tests.harness import run_ranks

STEPS = 3
# Model, ranks, rows of a step, those of the plan, constraints.
PLANS: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "llama dp2, 2 microbatches": ("llama", 2, 10, 12, {"dp": 2, "tp": 1, "pp": 1, "num_microbatches": 2}),
    "llama dp2 zero3": ("llama", 2, 7, 8, {"dp": 2, "zero": 3, "num_microbatches": 1}),
    "llama pp2 zb-h1": ("llama", 2, 7, 8, {"dp": 1, "pp": 2, "schedule": "zb-h1", "num_microbatches": 4}),
    "bert pp2, microbatches of 3": ("bert", 2, 8, 9, {"dp": 1, "pp": 2, "schedule": "1f1b", "microbatch": 3}),
    "llama pp2 interleaved": (
        "llama",
        2,
        9,
        10,
        {"dp": 1, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 5},
    ),
    "t5 dp2 tp2": ("t5", 4, 5, 6, {"dp": 2, "tp": 2, "num_microbatches": 1}),
    "mixtral dp2": ("mixtral", 2, 5, 8, {"dp": 2, "tp": 1, "pp": 1, "num_microbatches": 2}),
}
FAST = ("llama dp2, 2 microbatches",)


def train(case: str, rows: int, constraints: dict[str, Any]) -> tuple[int, int, list[float]]:
    """Rows of a step and of the plan, and the largest error of each step: of the loss, and of any gradient."""
    torch.manual_seed(0)
    model = CASES[case].build()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(
        model, dist.get_world_size(), example_inputs=batch_of(case, rows, 16, 0), **constraints
    )
    errors = errors_of_steps(parallel, alone, case, [(rows, 16)] * STEPS)
    plan = parallel.plan
    return plan.batch.global_size, plan.planned_rows, errors


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PLANS])
def test_steps_equal_those_of_one_process(name: str) -> None:
    case, ranks, rows, planned, constraints = PLANS[name]
    found_rows, found_planned, errors = run_ranks(train, ranks, case, rows, constraints)[0]
    assert (found_rows, found_planned) == (rows, planned)
    assert max(errors) < 1e-5


class Pair(nn.Module):
    """Rows are read alone, or, with a norm over the batch, together."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.BatchNorm1d(256) if norm else None, nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return (self.down((y if self.norm is None else self.norm(y)).relu()) - x).square().mean()


def test_a_free_search_takes_all_ranks_for_rows_that_none_divide() -> None:
    cluster = make_cluster("h100-sxm", 4)
    rows = 4093  # a prime
    planned = find_plan(Pair(norm=False), cluster, torch.zeros(rows, 64))
    assert planned.plan.data_parallel_size == 4
    assert (planned.plan.batch.global_size, planned.plan.planned_rows) == (rows, 4096)
    even = find_plan(Pair(norm=False), cluster, torch.zeros(4096, 64)).plan.prediction
    assert even is not None
    assert planned.plan.prediction is not None
    assert planned.plan.prediction.step_time_s == even.step_time_s
    assert planned.plan.prediction.tokens_per_s_per_gpu == pytest.approx(even.tokens_per_s_per_gpu * rows / 4096)


def test_a_batch_whose_rows_are_read_together_has_to_divide() -> None:
    with pytest.raises(
        InfeasiblePlan, match="30 does not divide into 4 microbatches, of 4 data-parallel ranks, which cannot differ"
    ):
        find_plan(Pair(norm=True), make_cluster("h100-sxm", 4), torch.zeros(30, 64), constraints=Constraints(dp=4))


def test_a_batch_with_fewer_rows_than_microbatches_is_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="the global batch of 3 does not divide"):
        find_plan(Pair(norm=False), make_cluster("h100-sxm", 4), torch.zeros(3, 64), constraints=Constraints(dp=4))


def _loaded(rows: int) -> list[list[float]]:
    torch.manual_seed(0)
    parallel = autopar.parallelize(
        Pair(norm=False), dist.get_world_size(), example_inputs=torch.zeros(rows, 64), dp=2, tp=1, pp=1
    )
    samples = torch.arange(4.0 * rows).view(-1, 1).expand(-1, 64)
    return [batch[:, 0].tolist() for batch in parallel.dataloader(samples, shuffle=False)]


def test_the_dataloader_gives_the_first_ranks_one_row_more() -> None:
    first, second = run_ranks(_loaded, 2, 7)
    assert [len(batch) for batch in first] == [4] * 4
    assert [len(batch) for batch in second] == [3] * 4
    whole = [row for one, other in zip(first, second, strict=True) for row in one + other]
    assert whole == [float(n) for n in range(28)]
