"""Token dispatch and combine send exactly the rows that routing asks for, whatever the routing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.lowered.moe import moe
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.primitives.collective_counter import CollectiveCounter, Issued
from autopar.ir.primitives.group_communication import joint_groups
from tests.harness import run_ranks
from tests.ir.layouts import axis_groups

HIDDEN, INNER, EXPERTS, TOP_K = 3, 4, 12, 2
WIDTH = HIDDEN * 8  # bytes of a row
OPTIONS: dict[str, Any] = {"activation": "silu", "gated": True}


@dataclass(frozen=True)
class Routing:
    """Tokens of all ranks and how often each expert is chosen, relative to the others."""

    tokens: int
    weights: tuple[float, ...]
    seed: int

    def tensors(self) -> list[Tensor]:
        torch.manual_seed(self.seed)
        index = torch.multinomial(torch.tensor(self.weights), self.tokens * TOP_K, replacement=True)
        found = [
            torch.randn(self.tokens, HIDDEN, dtype=torch.float64),
            index.view(self.tokens, TOP_K),
            torch.rand(self.tokens, TOP_K, dtype=torch.float64),
            torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float64),
            torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.float64),
        ]
        return [x.requires_grad_(x.is_floating_point()) for x in found]


def _routing(seed: int) -> Routing:
    """Balanced or skewed; experts, or all experts of a rank, may get nothing."""
    numbers = random.Random(seed)
    weights = numbers.choices([0.0, 0.01, 1.0, 10.0], [2, 1, 1, 1], k=EXPERTS)
    weights[numbers.randrange(EXPERTS)] = 1.0
    return Routing(tokens=4 * numbers.randint(1, 5), weights=tuple(weights), seed=seed)


Found = tuple[Tensor, list[Tensor], list[Issued]]


def _dispatch(mesh: Mesh, cases: list[Routing]) -> list[Found]:
    """Per routing: this rank's result, gradients of x, the weights and both matrices, and collectives."""
    names, rank = axis_groups(mesh), dist.get_rank()
    groups = {
        "expert_groups": tuple(names[axis] for axis in mesh.names),
        "dispatched": (True,) * len(mesh),
        "dispatch_groups": tuple(names[joint] for joint in joint_groups(mesh.names)),
    }
    found = []
    for case in cases:
        local = [x.detach().chunk(mesh.size)[rank].requires_grad_(x.is_floating_point()) for x in case.tensors()]
        with CollectiveCounter() as counter:
            out = moe(*local, **OPTIONS, **groups)
            out.square().sum().backward()  # type: ignore[no-untyped-call]
        found.append((out.detach(), [x.grad for x in local if x.grad is not None], counter.issued))
    return found


def _check(case: Routing, ranks: list[Found]) -> None:
    size = len(ranks)
    tensors = case.tensors()
    whole = composite.moe(*tensors, **OPTIONS)
    whole.square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(torch.cat([out for out, _, _ in ranks]), whole.detach())
    for number, expected in enumerate(x.grad for x in tensors if x.grad is not None):
        torch.testing.assert_close(torch.cat([grads[number] for _, grads, _ in ranks]), expected)

    home = (tensors[1] // (EXPERTS // size)).chunk(size)
    for rank, (_, _, issued) in enumerate(ranks):
        away = int((home[rank] != rank).sum())
        arriving = sum(int((home[other] == rank).sum()) for other in range(size) if other != rank)
        all_to_alls = [one for one in issued if one.kind == "all_to_all"]
        assert [one.phase for one in all_to_alls] == ["forward", "forward", "backward", "backward"]
        assert [one.sent_bytes // WIDTH for one in all_to_alls] == [away, arriving, away, arriving]
        sizes = [one for one in issued if one.kind != "all_to_all"]
        assert [(one.kind, one.payload_bytes) for one in sizes] == [("all_gather", size * EXPERTS * 8)]


@pytest.mark.parametrize("mesh", [Mesh.of(ep=2), Mesh.of(ep=2, tp=2)], ids=str)
def test_rows_sent_equal_the_routing(mesh: Mesh) -> None:
    """Over several axes in one all_to_all each way, as over one."""
    cases = [_routing(seed) for seed in range(60)]
    only = tuple(float(expert == 7) for expert in range(EXPERTS))
    cases.append(Routing(tokens=8, weights=only, seed=1))  # one expert gets everything
    ranks = run_ranks(_dispatch, mesh.size, mesh, cases)
    for number, case in enumerate(cases):
        _check(case, [rank[number] for rank in ranks])
