"""What experts keep for backward when their blocks are rematerialised: products, and the rows they were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.search.api import predict_plan
from benchmarks.models import CASES, build
from tests.harness import run_ranks
from tests.runtime.held import kept_by_a_step

pytest.importorskip("transformers")


def _kept(constraints: dict[str, Any]) -> tuple[float, float, bool]:
    """Bytes kept by a forward, predicted and measured; whether tokens are dispatched."""
    case, ranks = CASES["mixtral"], dist.get_world_size()
    parallel = autopar.parallelize(build(case), ranks, example_inputs=case.batch(0), **constraints)
    predicted = predict_plan(parallel.engine.captured, make_cluster("cpu", ranks, ranks), parallel.plan)
    rows = parallel.shard_batch(case.batch(0))
    parallel.step(**rows)
    measured = kept_by_a_step(parallel, rows)
    chosen = {factor for block in parallel.plan.blocks for axes in block.ops.values() for factor in axes.values()}
    return predicted.kept_bytes[0], measured, any(factor.endswith("&experts") for factor in chosen)


def _all_kept(each: list[dict[str, Any]]) -> list[tuple[float, float, bool]]:
    return [_kept(constraints) for constraints in each]


@pytest.mark.parametrize(
    ("ranks", "constraints"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {"ep": 2, "dp": 1, "zero": 0}),
        pytest.param(4, {"ep": 2, "dp": 2, "zero": 0}, marks=pytest.mark.slow),
    ],
)
def test_products_and_received_rows_are_kept(ranks: int, constraints: dict[str, Any]) -> None:
    levels = ("selective", "alternate")
    found = run_ranks(_all_kept, ranks, [{**constraints, "remat": level} for level in levels])
    for number, level in enumerate(levels):  # ranks have rows of other numbers
        predicted, measured = (sum(rank[number][which] for rank in found) for which in (0, 1))
        assert measured == pytest.approx(predicted, rel=0.03), level
        assert found[0][number][2] == (ranks > 1), "rows are dispatched to the ranks of their experts"
