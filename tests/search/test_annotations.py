"""``autopar.constrain``: what the user fixes is in the plan, the rest is searched, nonsense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autopar
from autopar.ir.annotations import layout_text, parse_annotation, parse_layout
from autopar.ir.errors import AutoparError, InfeasiblePlan, InvalidInput
from autopar.ir.plan import Plan
from tests.harness import run_ranks

B, S, H = 4, 8, 16


class Block(nn.Module):
    def __init__(self, fixed: dict[str, Any] | None) -> None:
        super().__init__()
        self.up, self.down, self.fixed = nn.Linear(H, 4 * H), nn.Linear(4 * H, H), fixed

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.fixed is not None:
            h = autopar.constrain(h, self.fixed)
        y: Tensor = x + self.down(torch.relu(h))
        return y


class Net(nn.Module):
    def __init__(self, fixed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fixed) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _plan(fixed: dict[str, Any] | None = None, **constraints: Any) -> Plan:
    return autopar.search(Net(fixed), 2, example_inputs={"x": torch.zeros(B, S, H)}, **constraints)


def _choices(plan: Plan, key: str) -> list[dict[str, str]]:
    """What the repeated block does with its op ``key``."""
    return [block.ops.get(key, {}) for block in plan.blocks if block.repeats > 1]


@pytest.mark.parametrize(("dim", "factor"), [(0, "n"), (1, "k")])
def test_parameters(dim: int, factor: str) -> None:
    fixed = autopar.constrain("*.up.weight", {"tp": Shard(dim)})
    assert _choices(_plan(tp=2, annotations=[fixed]), "up/linear") == [{"tp": factor}]


@pytest.mark.parametrize(
    ("placement", "axes"), [(Shard(1), {"tp": "d1"}), (Shard(-1), {"tp": "d2"}), (Replicate(), {})]
)
def test_tensors(placement: Any, axes: dict[str, str]) -> None:
    assert _choices(_plan({"tp": placement}, tp=2), "annotated") == [axes]


def test_outside_of_autopar_it_is_the_identity() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(autopar.constrain(x, {"tp": Shard(1)}), x)
    assert torch.autograd.gradcheck(lambda y: autopar.constrain(y, {"tp": Replicate()}), x)


def _fixed(pattern: str, dim: int) -> list[Any]:
    return [autopar.constrain(pattern, {"tp": Shard(dim)})]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: autopar.constrain(torch.zeros(2), {"tp": Shard(1)}), "Shard(dim) of a dimension from -1 to 0"),
        (lambda: _plan(annotations=_fixed("*.up.*", 0)), "there is no mesh axis 'tp'; the pinned ones are none"),
        (lambda: _plan(tp=2, annotations=_fixed("blocks.0.upp.weight", 0)), "names like it: blocks.0.up.weight"),
        (lambda: _plan(tp=2, annotations={"*.up.bias": {"tp": 0}}), "expected: what autopar.constrain"),
        (lambda: _plan(tp=2, annotations=_fixed("*.up.bias", 1)), "blocks.0.up.bias has 1 dimensions"),
        (lambda: _plan(tp=2, annotations=_fixed("blocks.1.up.weight", 0)), "matches only one of blocks.1.up.weight"),
        (lambda: _plan({"dp": Shard(2)}, dp=2), "agrees with what autopar.constrain fixes"),
    ],
)
def test_refusals(request_: Any, message: str) -> None:
    with pytest.raises(AutoparError) as caught:
        request_()
    assert message in str(caught.value)


def test_layouts_are_read_back() -> None:
    assert parse_layout(layout_text((("dp", None), ("tp", 2)))) == (("dp", None), ("tp", 2))
    assert parse_annotation(" *.up.weight: tp=0") == autopar.constrain("*.up.weight", {"tp": Shard(0)})
    with pytest.raises(InvalidInput, match="tp:0"):
        parse_layout("tp:0")
    with pytest.raises(InvalidInput, match="expected PATTERN: AXIS=DIM"):
        parse_annotation("*.up.weight")


def _train() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    alone, model = Net(), Net({"tp": Shard(1)})
    model.load_state_dict(alone.state_dict())
    x = torch.randn(B, S, H)
    whole = autopar.constrain("*.down.weight", {"tp": Replicate()})
    parallel = autopar.parallelize(model, 2, example_inputs={"x": x}, tp=2, annotations=[whole])
    losses: tuple[list[float], list[float]] = ([], [])
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    mine = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(3):
        own.zero_grad()
        mine.zero_grad()
        loss = alone(x)
        loss.backward()
        losses[0].append(float(loss.detach()))
        losses[1].append(float(parallel.step(x=x)))
        own.step()
        mine.step()
    return losses


def test_training_is_exact() -> None:
    for expected, found in run_ranks(_train, 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="its sizes do not divide"):
        inputs = {"x": torch.zeros(B, S - 1, H)}
        autopar.search(Net({"tp": Shard(1)}), 2, example_inputs=inputs, tp=2)
