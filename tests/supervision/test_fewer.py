"""Plans for fewer ranks are found beside training, and each is known by the number of ranks that it is for."""

from __future__ import annotations

import time
from pathlib import Path

from autopar.ir.plan import Plan
from autopar.supervision.fewer import FewerRanks, cluster_like
from autopar.training.job import TrainingJob

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return (self.second(self.first(x).relu()) - x).square().mean()
def model(): return Net()
def example_inputs(batch_size=12): return (torch.zeros(batch_size, 8),)
"""


def fewer(folder: Path) -> FewerRanks:
    from autopar.cost_model.catalogue import make_cluster
    from autopar.load_model import load_model_file
    from autopar.planning import find_plan

    (folder / "net.py").write_text(MODEL)
    source = load_model_file(str(folder / "net.py"))
    plan = find_plan(source.meta_model(), make_cluster("cpu", 4, 4), source.meta_inputs(12), name=source.name).plan
    plan.save(folder / "plan.yaml")
    return FewerRanks(TrainingJob(model=str(folder / "net.py"), plan=str(folder / "plan.yaml"), steps=1).opened())


def test_sizes_that_are_asked_for_later_get_their_own_plans(tmp_path: Path) -> None:
    plans = fewer(tmp_path)
    plans.ahead([3, 2])
    plans.ahead([2, 1, 4, 0])  # before the first are answered
    until = time.monotonic() + 120
    while plans._asked and time.monotonic() < until:
        plans.collect()
        time.sleep(0.02)
    plans.stop()
    for size in (1, 2, 3):
        found = plans.plan(size)
        assert found is not None
        assert (found[0], Plan.from_yaml(found[1]).num_ranks) == (size, size)
        assert plans.searched_s == 0  # ahead


def test_a_helper_that_ends_is_made_up_for(tmp_path: Path) -> None:
    plans = fewer(tmp_path)
    plans.ahead([2])
    assert plans._helper is not None
    plans._helper.stop()
    found = plans.plan(2)
    assert found is not None
    assert Plan.from_yaml(found[1]).num_ranks == 2
    assert plans.searched_s > 0
    plans.plan(2)
    assert plans.searched_s == 0


def test_nodes_of_fewer_ranks_are_equal(tmp_path: Path) -> None:
    plan = fewer(tmp_path)._opened.plan
    assert (cluster_like(plan, 3).num_gpus, cluster_like(plan, 3).gpus_per_node) == (3, 3)
