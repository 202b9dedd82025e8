"""What experts keep for backward when their blocks are rematerialised: the products inside, and the rows that came."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.search.api import predict_plan
from benchmarks.models import CASES, build
from tests.harness import run_ranks
from tests.runtime.held import Saved, held_bytes

pytest.importorskip("transformers")


def _kept(name: str, constraints: dict[str, Any]) -> tuple[float, float, bool]:
    """Bytes kept by a forward, predicted and measured; whether tokens are dispatched."""
    case, ranks = CASES[name], dist.get_world_size()
    parallel = autopar.parallelize(build(case), ranks, example_inputs=case.batch(0), **constraints)
    predicted = predict_plan(parallel.engine.captured, make_cluster("cpu", ranks, ranks), parallel.plan)
    rows = parallel.shard_batch(case.batch(0))
    parallel.step(**rows)
    saved, measured = Saved(), list[float]()
    parallel.engine.stage.register_forward_hook(lambda *_: measured.append(held_bytes() - before))
    before = held_bytes()
    with saved:
        parallel.step(**rows)
    chosen = {factor for block in parallel.plan.blocks for axes in block.ops.values() for factor in axes.values()}
    return predicted.kept_bytes[0], measured[0], any(factor.endswith("&experts") for factor in chosen)


def _all_kept(name: str, each: list[dict[str, Any]]) -> list[tuple[float, float, bool]]:
    return [_kept(name, constraints) for constraints in each]


@pytest.mark.parametrize(
    ("name", "ranks", "constraints"),
    [
        pytest.param("mixtral", 1, {}, marks=pytest.mark.slow),
        ("mixtral", 2, {"ep": 2, "dp": 1, "zero": 0}),
        pytest.param("mixtral", 4, {"ep": 2, "dp": 2, "zero": 0}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, {"ep": 2, "dp": 1, "zero": 0}, marks=pytest.mark.slow),
    ],
)
def test_products_and_rows_that_came_are_kept(name: str, ranks: int, constraints: dict[str, Any]) -> None:
    levels = ("selective", "alternate")
    found = run_ranks(_all_kept, ranks, name, [{**constraints, "remat": level} for level in levels])
    for number, level in enumerate(levels):  # ranks have rows of other numbers
        predicted, measured = (sum(rank[number][which] for rank in found) for which in (0, 1))
        assert measured == pytest.approx(predicted, rel=0.03), level
        assert found[0][number][2] == (ranks > 1), "rows are dispatched to the ranks of their experts"
