"""Indexing by ``arange``: a view where it names every position in order, untouched where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.ir.graph import CapturedModel
from autopar.passes.normalise.identity_index import IdentityIndexToView
from tests.ir.tracing import Tracer, aten


def positions(t: Tracer, size: int, *shape: int) -> fx.Node:
    return t.call(aten.reshape.default, t.call(aten.arange.default, size, device="meta"), list(shape))


def targets(captured: CapturedModel) -> set[object]:
    used = {node for node in captured.graph.nodes if node.op == "call_function" and node.users}
    return {node.target for node in used}


def outcome(t: Tracer, result: fx.Node, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, set[object]]:
    """The result before and after the pass, and the ops that are left."""
    captured = t.done(result, has_loss=False)
    for node in captured.graph.nodes:
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
    captured.graph_module.recompile()
    (before,) = captured.graph_module(x)
    captured = IdentityIndexToView().apply(captured)
    captured.graph.lint()
    captured.graph_module.recompile()
    (after,) = captured.graph_module(x)
    return before, after, targets(captured)


@pytest.mark.parametrize(
    ("shapes", "order"),
    [
        (((4, 1, 1, 1), (1, 1, 1, 6)), "in order"),
        (((1, 4), (6, 1)), "permuted"),
        (((4, 1), (6,)), "unequal ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_position_in_order_is_a_view(shapes: tuple[tuple[int, ...], ...], order: str) -> None:
    t = Tracer()
    x = t.input("x", 4, 6, 2)
    indices = [positions(t, 4, *shapes[0]), positions(t, 6, *shapes[1])]
    before, after, left = outcome(t, t.call(aten.index.Tensor, x, indices), torch.randn(4, 6, 2))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert aten.index.Tensor not in left
    assert (aten.permute.default in left) == (order == "permuted")


def test_other_positions_stay_an_index() -> None:
    for kind in ("diagonal", "shorter", "shifted"):
        t = Tracer()
        x = t.input("x", 4, 4)
        rows = t.call(aten.arange.default, 4, device="meta")
        if kind == "diagonal":
            result = t.call(aten.index.Tensor, x, [rows, rows])
        elif kind == "shorter":
            result = t.call(aten.index.Tensor, x, [t.call(aten.arange.default, 3, device="meta")])
        else:
            result = t.call(aten.index.Tensor, x, [t.call(aten.sub.Tensor, rows, 1)])
        before, after, left = outcome(t, result, torch.randn(4, 4))
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert aten.index.Tensor in left, kind
