"""Tensors made of parameters alone: 1 + w, a transposed matrix, embedded positions. Their gradients are those of
parameters: exact under every strategy, and summed once a step however many microbatches there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.analysis.batch_and_sequence import find_roles
from autopar.ir.analysis.derived_parameters import find_derived, passing_axes
from autopar.ir.capture.capture import capture
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.passes.normalise import normalise
from tests.harness import run_ranks

ROWS, SEQ, WIDTH, CLASSES = 8, 4, 8, 12


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.linspace(-0.3, 0.3, WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scaled = F.rms_norm(x, (WIDTH,)) * (1.0 + self.offset)
        return x + torch.matmul(F.gelu(scaled), (2.0 * self.matrix).transpose(0, 1).contiguous())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Embedding(2 * SEQ, WIDTH)
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, CLASSES, (ROWS, SEQ), generator=generator) for name in ("tokens", "targets")}


def _gradients(plans: list[dict[str, Any]]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    found = []
    for constraints in plans:
        pm = autopar.parallelize(_net(), dist.get_world_size(), example_inputs=_batch(), **constraints)
        found.append((pm.step(**pm.shard_batch(_batch())), pm.full_gradients()))
    return found


PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        *({"dp": 2, "zero": zero, "num_microbatches": count} for zero in (0, 1, 3) for count in (1, 4)),
        {"pp": 2, "num_microbatches": 4, "schedule": "zb-h1"},
        {"tp": 2, "num_microbatches": 2},
        {"tp": 2, "sequence_parallel": True, "num_microbatches": 2},
        {"dp": 2, "num_microbatches": 2, "remat": "full"},
    ],
    4: [
        {"dp": 2, "tp": 2, "zero": 2, "num_microbatches": 2},
        {"dp": 2, "pp": 2, "num_microbatches": 4},
    ],
}


@pytest.mark.parametrize("ranks", PLANS)
def test_gradients_equal_those_of_one_process(ranks: int) -> None:
    net = _net()
    expected = net(**_batch())
    expected.backward()
    for rank in run_ranks(_gradients, ranks, PLANS[ranks]):
        for constraints, (loss, gradients) in zip(PLANS[ranks], rank, strict=True):
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6, msg=str(constraints))
            for name, parameter in net.named_parameters():
                where = f"{name} under {constraints}"
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=where)


def _sums(count: int) -> int:
    pm = autopar.parallelize(
        _net(), dist.get_world_size(), example_inputs=_batch(), dp=2, zero=0, num_microbatches=count
    )
    rows = pm.shard_batch(_batch())
    pm.step(**rows)
    with CollectiveCounter() as counter:
        pm.step(**rows)
    return len(list(counter.select("all_reduce", phase="backward")))


def test_microbatches_add_no_sums() -> None:
    one, four = (run_ranks(_sums, 2, count)[0] for count in (1, 4))
    assert one == four


def test_summands_pass_where_all_users_give_them() -> None:
    captured = normalise(capture(_net(), _batch()))
    roles = find_roles(captured)
    uses = find_derived(captured, roles)
    aten = torch.ops.aten
    # In each layer 1 + w, twice the matrix and its transpose; once the positions. Tokens carry the batch.
    made = [node.target for node in uses]
    assert made == [aten.embedding.default] + 2 * [aten.add.Tensor, aten.mul.Tensor, aten.transpose.int]
    # Axis 0 divides the batch; on axis 1 every rank repeats everything, so that gradients are whole.
    assignments = {node: (roles.batch.get(node), None) for node in roles.rules}
    assert set(passing_axes(uses, assignments, roles).values()) == {frozenset({0})}
