"""What is private in torch of symbols is still there and does what is relied on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.ir import torch_private_symbols as private
from tests.private_names import Cases, public_names

cases = Cases()
case = cases.of


def test_every_name_has_a_case() -> None:
    assert set(cases) == public_names(private)


@pytest.mark.parametrize("name", sorted(public_names(private)))
def test_torch_has(name: str) -> None:
    cases[name]()


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        private.are_equal(x.shape[0], y.shape[0])
        return x.sum() + y.sum()


@case("are_equal")
def _equal() -> None:
    dims = {0: torch.export.Dim.AUTO}
    program = torch.export.export(Sum(), (torch.ones(6), torch.ones(6)), dynamic_shapes=(dims, dims), strict=False)
    x, y = (node.meta["val"].shape[0] for node in program.graph.nodes if node.op == "placeholder")
    assert private.expression_of_symbol(x) == private.expression_of_symbol(y)


class Rows(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(2 * x.shape[0] + 1), x[x > 0]


@case("is_symbolic", "is_unknown", "hint_of", "expression_of_symbol", "symbolic_size", "python_kernels")
def _symbols() -> None:
    x = torch.ones(6, 3)
    program = torch.export.export(Rows(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    nodes = {node.name: node for node in program.graph.nodes}
    traced = nodes["x"].meta["val"]
    rows, columns = traced.shape
    made, chosen = (node.meta["val"].shape[0] for node in nodes["output"].args[0])
    assert [private.is_symbolic(size) for size in (rows, columns, made, chosen)] == [True, False, True, True]
    assert [private.is_unknown(size) for size in (rows, columns, made, chosen)] == [False, False, False, True]
    assert (private.hint_of(rows), private.hint_of(made)) == (6, 13)
    symbol = private.expression_of_symbol(rows)
    assert private.expression_of_symbol(made) == 2 * symbol + 1
    assert private.expression_of_symbol(columns) == 3
    size = private.symbolic_size(traced.fake_mode, 3 * symbol, 18)
    assert private.expression_of_symbol(size) == 3 * symbol
    with traced.fake_mode, private.python_kernels():
        mask = torch.empty(size, dtype=torch.bool)
        assert private.expression_of_symbol(torch.empty(size).masked_fill(mask, 0).shape[0]) == 3 * symbol


class Counted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * len(x)


@case("fixing_lines")
def _fixed() -> None:
    dims = {0: torch.export.Dim.AUTO}
    program = torch.export.export(Counted(), (torch.ones(6),), dynamic_shapes=(dims,), strict=False)
    value = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    line = private.fixing_lines(value.fake_mode)[6]
    assert line.startswith(__file__)
    assert "len(x)" in Path(__file__).read_text().splitlines()[int(line.rpartition(":")[2]) - 1]
