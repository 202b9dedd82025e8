from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.building import add_call, fake_mode_of
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.contract import Pass
from autopar.passes.pipeline import PassReport, run_passes
from autopar.passes.verify.well_formed import Memo, verify

aten = torch.ops.aten


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * 2).relu()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Replace(Pass[CapturedModel]):
    """Every relu by another op."""

    by: torch._ops.OpOverload
    name: ClassVar[str] = "replace"

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        for node in list(graph.nodes):
            if node.target is aten.relu.default:
                with graph.inserting_before(node):
                    args = (node.args[0],)
                    new = add_call(graph, fake_mode_of(graph), self.by, args, like=node, value=node.meta["val"])
                node.replace_all_uses_with(new)
        return captured


@pytest.fixture
def captured() -> CapturedModel:
    return capture(Doubling(), torch.randn(3, 4))


def test_a_pass_works_on_a_copy_and_dead_ops_go(captured: CapturedModel) -> None:
    before = str(captured.graph)
    reports: list[PassReport] = []
    after = run_passes(captured, [Replace(aten.tanh.default)], report=reports.append)
    assert str(captured.graph) == before
    assert (reports[0].removed, reports[0].added) == ({"relu.default": 1}, {"tanh.default": 1})
    assert str(reports[0]).startswith("replace: ") and "-1 relu.default, +1 tanh.default" in str(reports[0])
    assert aten.relu.default not in {node.target for node in after.graph.nodes}


def test_a_pass_that_changes_a_dtype_is_caught(captured: CapturedModel) -> None:
    with pytest.raises(AssertionError, match=r"after replace: .*logical_not") as caught:
        run_passes(captured, [Replace(aten.logical_not.default)])
    assert "test_pipeline.py" in str(caught.value)


def test_the_first_pass_at_fault_is_named(captured: CapturedModel) -> None:
    @dataclass(frozen=True)
    class Stumble(Pass[CapturedModel]):
        name: ClassVar[str] = "stumble"

        def apply(self, captured: CapturedModel) -> CapturedModel:
            assert aten.relu.default in {node.target for node in captured.graph.nodes}, "what it builds on is gone"
            return captured

    with pytest.raises(AssertionError, match="after replace: "):
        run_passes(captured, [Stumble(), Replace(aten.logical_not.default), Stumble()])
    with pytest.raises(AssertionError, match="what it builds on"):
        run_passes(captured, [Replace(aten.tanh.default), Stumble()])


def test_an_operand_that_changes_is_seen(captured: CapturedModel) -> None:
    memo = Memo()
    verify(captured, memo=memo)
    relu = next(node for node in captured.graph.nodes if node.target is aten.relu.default)
    operand = relu.args[0]
    assert isinstance(operand, torch.fx.Node)
    operand.meta["val"] = operand.meta["val"].new_empty(2, 4)
    with pytest.raises(AssertionError):
        verify(captured, memo=memo)


def test_nothing_is_caught_if_nothing_is_checked(captured: CapturedModel) -> None:
    run_passes(captured, [Replace(aten.logical_not.default)], check=False)


def test_a_placeholder_that_is_nothing(captured: CapturedModel) -> None:
    first = next(iter(captured.graph.nodes))
    with captured.graph.inserting_before(first):
        captured.graph.placeholder("stray").meta["val"] = first.meta["val"]
    with pytest.raises(AssertionError, match="placeholders \\['stray'\\]"):
        verify(captured)


def test_an_update_that_is_not_returned(captured: CapturedModel) -> None:
    output = next(iter(reversed(captured.graph.nodes)))
    output.args = ((*output.args[0][:-1], None),)
    with pytest.raises(AssertionError, match="buffers are updated by"):
        verify(captured)


def test_an_op_before_its_operand(captured: CapturedModel) -> None:
    nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
    nodes[0].append(nodes[-1])
    nodes[-1].append(nodes[0])
    with pytest.raises(AssertionError, match="after capture"):
        verify(captured)
