"""Rows in the order of their documents: the proof accepts the programs, and refuses what is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.ir.capture.capture import capture
from autopar.ir.errors import UnprovenProgram
from autopar.ir.graph import CapturedModel
from autopar.ir.lowered.ring import ring_attention
from autopar.ir.packed_order import to_document_order
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from tests.parity import with_attention
from tests.passes.verify.programs import programs_of

LENGTH = 16


class Packed(nn.Module):
    """Two attentions within documents around a residual. touch: what is done to the rows on the way."""

    def __init__(self, touch: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.touch = touch

    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
        x = self.embed(tokens)
        for qkv in self.qkv:
            q, k, v = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in qkv(self.touch(x)).chunk(3, -1))
            a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + a.transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def captured_as(model: nn.Module) -> CapturedModel:
    tokens = torch.randint(0, 32, (4, LENGTH))
    return normalise(capture(model, (tokens, tokens.clone(), torch.arange(LENGTH).expand(4, -1) // 5)), check=False)


def ring_plan(captured: CapturedModel, ranks: int, constraints: dict[str, Any]) -> Plan:
    """The plan of the search with a ring for every attention, in zigzag layout."""
    return with_attention(programs_of(captured, ranks, constraints)[0], {"cp": "s&t"}, "zigzag")


@pytest.fixture(scope="module")
def packed() -> tuple[CapturedModel, Plan]:
    captured = captured_as(Packed())
    return captured, ring_plan(captured, 4, {"dp": 2, "cp": 2})


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def test_programs_are_in_the_order_of_documents_and_proved(packed: tuple[CapturedModel, Plan]) -> None:
    captured, plan = packed
    programs = partition(place_captured(captured, plan), outputs="loss")
    graphs = [block.graph for program in programs for block in program.blocks]
    assert sum(len(calls(graph, ring_attention)) for graph in graphs) == 2
    # Tokens and labels; nothing else runs along the sequence.
    assert sum(len(calls(graph, to_document_order)) for graph in graphs) == 2
    verify_placements(captured, programs, plan)


def without_documents(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "documents": None}


def other_order(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "by_documents": False}


def other_ranks(node: fx.Node) -> None:
    key = "zigzag_ranks" if node.target is ring_attention else "num_ranks"
    node.kwargs = {**node.kwargs, key: 4}


def one_order_for_all_rows(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "rows": None}


def not_put_in_order(node: fx.Node) -> None:
    (x, _) = node.args
    node.replace_all_uses_with(x)


def of_other_documents(node: fx.Node) -> None:
    (x, _) = node.args
    node.args = (x, x)


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [
        (ring_attention, without_documents, "no op of the model is this call"),
        (ring_attention, other_order, "its argument by_documents is"),
        (ring_attention, other_ranks, "its argument zigzag_ranks is"),
        (to_document_order, other_ranks, "others are of"),
        (to_document_order, one_order_for_all_rows, "does not have the rows of the documents"),
        (to_document_order, not_put_in_order, "order"),
        (to_document_order, of_other_documents, "within documents|others are of"),
    ],
)
def test_another_order_is_refused(
    packed: tuple[CapturedModel, Plan], target: Any, change: Callable[[fx.Node], None], reason: str
) -> None:
    captured, plan = packed
    programs = partition(place_captured(captured, plan), outputs="loss")
    nodes = [node for program in programs for block in program.blocks for node in calls(block.graph, target)]
    change(nodes[-1])
    with pytest.raises(UnprovenProgram, match=reason):
        verify_placements(captured, programs, plan)


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: x + x.mean(0, keepdim=True),  # of all rows, which are in different orders
        lambda x: x.flip(0),
        lambda x: x + torch.linspace(0, 1, LENGTH)[:, None],  # along the sequence, without rows
    ],
)
def test_rows_that_meet_are_all_in_zigzag_layout(touch: Callable[[Tensor], Tensor]) -> None:
    captured = captured_as(Packed(touch))
    plan = ring_plan(captured, 2, {"cp": 2})
    programs = partition(place_captured(captured, plan), outputs="loss")
    graphs = [block.graph for program in programs for block in program.blocks]
    assert not any(calls(graph, to_document_order) for graph in graphs)
    assert {node.kwargs["by_documents"] for graph in graphs for node in calls(graph, ring_attention)} == {False}
    verify_placements(captured, programs, plan)
