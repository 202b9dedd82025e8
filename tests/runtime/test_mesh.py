"""Models on equal meshes share process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from tests.harness import run_ranks


class Tied(nn.Module):
    """The first and the last of three layers share their weight, so a group over some stages is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x))))).square().mean()


def _num_groups(**constraints: int) -> list[int]:
    counts = []
    for _ in range(3):
        torch.manual_seed(0)
        model = autopar.parallelize(Tied(), dist.get_world_size(), example_inputs=torch.randn(8, 8), **constraints)
        model.step(model.shard_batch(torch.randn(8, 8)))
        counts.append(len(dist.distributed_c10d._world.pg_map))
        del model
    return counts


def test_a_second_model_makes_no_groups() -> None:
    for counts in run_ranks(_num_groups, 4, dp=2, tp=2, zero=1):
        assert counts[0] == counts[1] == counts[2] > 1


def test_nor_groups_over_stages() -> None:
    found = run_ranks(_num_groups, 3, pp=3, num_microbatches=2)
    assert max(found)[0] > 1, "ranks that share the weight have a group"
    for counts in found:
        assert counts[0] == counts[1] == counts[2]
