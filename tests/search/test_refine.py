"""What is decided once a plan has its ops and stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.analysis.op_clusters import BATCH
from autopar.ir.capture.capture import capture
from autopar.passes.normalise import normalise
from autopar.search.outer.best_first import Outer
from autopar.search.outer.configuration import Candidate
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.prices import Prices
from autopar.search.outer.refine import refine
from autopar.search.predict.to_plan import name_axes
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload


class Tagger(nn.Module):
    """A class for each token, and a loss that counts those with a label."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8 * width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 8 * width)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(self.embed(tokens))))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), ignore_index=0)


def with_whole_inputs() -> tuple[Solver, Candidate]:
    """The best plan on eight ranks, but every rank is handed the whole batch."""
    with torch.device("meta"):
        tokens = torch.zeros(64, 512, dtype=torch.long)
        captured = normalise(capture(Tagger(1024), (tokens, tokens.clone())))
    cluster = make_cluster("a100-80gb", 8)
    workload = Workload.of(captured, "bf16")
    solver = Solver(prices=Prices(workload, cluster), budget_bytes=cluster.device.usable_bytes)
    found = Outer(solver=solver, constraints=Constraints(precision="bf16")).run()
    assert found is not None
    assignment = list(found.assignment)
    assignment[workload.clusters.inputs.index] = (None,) * len(found.pricing.mesh)
    whole = replace(found, assignment=tuple(assignment))
    return solver, replace(whole, priced=evaluate_stages(whole.pricing, whole.assignment, whole.stages))


def test_a_data_parallel_rank_is_handed_its_own_rows() -> None:
    solver, whole = with_whole_inputs()
    workload = whole.pricing.workload
    names = name_axes(workload, whole.pricing.mesh, whole.assignment).names
    assert any(name.startswith("dp") for name in names)
    inputs = refine(solver, whole).assignment[workload.clusters.inputs.index]
    assert inputs == tuple(BATCH if name.startswith("dp") else None for name in names)


@pytest.mark.parametrize("pinned", ["a faster baseline", "inputs"])
def test_it_is_not_where_that_is_ruled_out(pinned: str) -> None:
    solver, whole = with_whole_inputs()
    if pinned == "inputs":
        whole = replace(whole, configuration=replace(whole.configuration, batch_axes=()))
    baseline_s = 0.5 * whole.predicted.step_time_s if pinned == "a faster baseline" else float("inf")
    index = whole.pricing.workload.clusters.inputs.index
    assert refine(solver, whole, baseline_s).assignment[index] == whole.assignment[index]
