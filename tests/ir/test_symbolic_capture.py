"""One capture with symbols is, at any batch and length, the capture of that batch and length."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.ir.capture.capture import capture
from autopar.ir.capture.other_sizes import captured_at, sizes_of_inputs
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel
from autopar.ir.sizes import Ratio, Size, at, same_sizes
from autopar.ir.torch_private import pytree
from autopar.passes.normalise import normalise
from benchmarks.models import CASES, Case


def captured_case(case: Case, rows: int, length: int, *, symbolic: bool = False) -> CapturedModel:
    """A model of the benchmarks on inputs of that batch and length, in normal form."""
    torch.manual_seed(0)
    given = {name: resized(tensor, rows, length) for name, tensor in case.batch(0).items()}
    target = given.pop("target", None)
    captured = capture(case.build(), given, loss_fn=case.loss_fn, example_target=target, symbolic=symbolic)
    return normalise(captured, check=False)


def resized(tensor: Tensor, rows: int, length: int) -> Tensor:
    """Of another batch, and, if it holds integers, of another length."""
    sizes = [rows, *tensor.shape[1:]]
    if tensor.dim() > 1 and not tensor.is_floating_point():
        sizes[1] = length
    return tensor.new_zeros(sizes)


def described(captured: CapturedModel) -> list[str]:
    """Every op with its arguments, operands by number, and the shapes that it makes."""
    number = {node: place for place, node in enumerate(captured.graph.nodes)}
    lines = []
    for node in captured.graph.nodes:
        given = fx.node.map_arg((node.args, node.kwargs), lambda operand: f"%{number[operand]}")
        made = pytree.tree_map(lambda v: tuple(v.shape) if isinstance(v, Tensor) else v, node.meta.get("val"))
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {given} -> {made}")
    return lines


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama", "bert", "convnext", "mistral", "mixtral")
]


@pytest.mark.parametrize("name", ["vit", *SLOW])
def test_a_capture_at_other_sizes_is_that_of_those_sizes(name: str) -> None:
    case = CASES[name]
    symbolic = captured_case(case, 8, 16, symbolic=True)
    for rows, length in ((3, 10), (2, 31), (8, 16)):
        sizes = {"batch": rows, "length": length, "length_2": length}
        found = captured_at(symbolic, {name: sizes[name] for name in symbolic.symbols})
        assert described(found) == described(captured_case(case, rows, length))
        assert found.batch_size == rows


def test_symbols_have_the_sizes_of_the_capture() -> None:
    captured = captured_case(CASES["llama"], 8, 16, symbolic=True)
    assert sizes_of_inputs(captured) == {"batch": 8, "length": 16}


class Fixed(nn.Module):
    """Sums as many positions as the example has."""

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.ones(16, 4)
        return F.embedding(tokens, table)[:, :, 0].sum(1).reshape(8).sum()


def test_what_the_model_fixes_is_no_symbol() -> None:
    captured = capture(Fixed(), torch.zeros(8, 16, dtype=torch.int64), symbolic=True)
    assert set(captured.symbols) == {"length"}
    with pytest.raises(CaptureError, match=r"captured for one size of \['batch'\]"):
        captured_at(captured, {"batch": 4})


def test_sizes_carry_their_expressions() -> None:
    captured = captured_case(CASES["llama"], 8, 16, symbolic=True)
    batch, length = (captured.symbols[name] for name in ("batch", "length"))
    rows, columns = Size(8, batch), Size(16, length)
    point = {batch: 3, length: 10}
    cases: list[tuple[Any, int | float]] = [
        (rows * columns, 30),
        (2 * columns - 1, 19),
        (columns // 4 + rows, 5),
        (-rows % columns, 7),
        (1 / (rows * columns), 1 / 30),
        (columns / rows, 10 / 3),
    ]
    for found, expected in cases:
        assert at(found, point) == pytest.approx(expected)
        assert isinstance(found, Size | Ratio)
        assert type(at(found, point)) in (int, float)
    assert type(rows - rows + 5) is int
    for number in (rows, 1 / rows):
        for copied in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
            assert (type(copied), copied, copied.expression) == (type(number), number, number.expression)
    assert not same_sizes((Size(8, batch),), (8,))
    assert same_sizes((Size(8, batch), 4), (rows, 4))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x).sum() * len(x) + ids.sum()


def test_the_line_that_makes_a_size_a_number_is_named() -> None:
    captured = capture(Counted(), (torch.randn(6, 4), torch.zeros(6, 5, dtype=torch.int64)), symbolic=True)
    assert set(captured.symbols) == {"length"}
    path, _, line = captured.fixed["batch"].removeprefix("a number is made of it at ").rpartition(":")
    assert path == __file__
    assert "len(x)" in Path(path).read_text().splitlines()[int(line) - 1]
    with pytest.raises(CaptureError, match="batch is of one size: a number is made of it at "):
        captured_at(captured, {"batch": 12})
