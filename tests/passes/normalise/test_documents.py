"""Masks that keep apart documents which are packed into rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir.building import shape_of
from autopar.ir.capture.capture import capture
from autopar.ir.ops import composite
from autopar.ir.ops.documents import in_one_piece, runs_of
from autopar.passes.normalise import normalise
from tests.ir.models import assert_same_training

B, H, S, D = 3, 2, 10, 8

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3], list(range(10)), [0, 1, 0, 0, 1, 2, 3, 4, 5, 6]])
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


class Packed(nn.Module):
    """One attention; ``mask(ids, positions)`` says which keys are seen."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(D, 3 * H * D)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (p.view(B, S, H, D).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        seen = self.mask(counted(positions), positions)
        return F.scaled_dot_product_attention(q, k, v, seen).square().sum()


def counted(positions: Tensor) -> Tensor:
    """The number of each position's document, as transformers has it."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def queries(x: Tensor) -> Tensor:
    return x[:, None, :, None]


def keys(x: Tensor) -> Tensor:
    return x[:, None, None, :]


def same(ids: Tensor) -> Tensor:
    return queries(ids) == keys(ids)


def ordered(positions: Tensor) -> Tensor:
    return keys(positions) <= queries(positions)


def near(positions: Tensor) -> Tensor:
    return keys(positions) > queries(positions) - 3


def normal(mask: Callable[[Tensor, Tensor], Tensor]) -> fx.Node:
    torch.manual_seed(0)
    model, inputs = Packed(mask), (torch.randn(B, S, D), POSITIONS)
    captured = normalise(capture(model, inputs))
    assert_same_training(captured, model, inputs)
    (call,) = (node for node in captured.graph.nodes if node.target is composite.attention)
    return call


def described(node: fx.Node) -> tuple[Any, ...]:
    """(kind, window, shape of the mask, name of the op that gives the documents)"""
    mask, _, documents = (*node.args[3:], None, None, None)[:3]
    return (
        node.kwargs["kind"],
        node.kwargs.get("window"),
        shape_of(mask) if isinstance(mask, fx.Node) else None,
        str(documents.target).split(".")[1]
        if isinstance(documents, fx.Node) and documents.op != "placeholder"
        else documents and documents.name,
    )


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda ids, positions: same(ids) & ordered(positions), ("causal", None, None, "cumsum")),
        (lambda ids, positions: ordered(positions) & same(ids), ("causal", None, None, "cumsum")),
        (lambda ids, positions: same(ids) & ordered(positions) & near(positions), ("sliding", 3, None, "cumsum")),
        (
            lambda ids, positions: torch.ones((), dtype=torch.bool) & same(ids) & ordered(positions) & near(positions),
            ("sliding", 3, None, "cumsum"),
        ),
        (lambda ids, positions: same(ids) & CAUSAL, ("causal", None, None, "cumsum")),
        (lambda ids, positions: same(ids), ("full", None, None, "cumsum")),
        (lambda ids, positions: same(positions // 2), ("full", None, None, "floor_divide")),
        (lambda ids, positions: same(ids) & keys(positions < 3), ("mask", None, (B, 1, 1, S), "cumsum")),
        # Positions that others count say nothing of places.
        (lambda ids, place: same(place // 4) & ordered(place), ("mask", None, (B, 1, S, S), "floor_divide")),
        (lambda ids, positions: same(ids) & ordered(positions * 2), ("mask", None, (B, 1, S, S), "cumsum")),
        (lambda ids, positions: queries(ids) == keys(positions), ("mask", None, (B, 1, S, S), None)),
    ],
)  # fmt: skip
def test_what_keeps_documents_apart(mask: Callable[[Tensor, Tensor], Tensor], expected: tuple[Any, ...]) -> None:
    assert described(normal(mask)) == expected


def test_runs_of_documents() -> None:
    found = runs_of(counted(POSITIONS))
    ends = [[(run.start, run.stop) for run in runs] for runs in found]
    assert ends == [[(0, 4), (4, 6), (6, 10)], [(0, 10)], [(0, 2), (2, 3), (3, 10)]] and in_one_piece(found)
    found = runs_of(torch.tensor([[7, 7, 2, 2, 7]]))
    assert found == [((0, 2, 7), (2, 4, 2), (4, 5, 7))] and not in_one_piece(found)
    assert runs_of(torch.zeros(0, 4, dtype=torch.int64)) == []
    documents = torch.tensor([[1, 1, 2]])
    assert runs_of(documents) == [((0, 2, 1), (2, 3, 2))]
    documents.fill_(3)
    assert runs_of(documents) == [((0, 3, 3),)]
    with torch.inference_mode():
        assert runs_of(torch.tensor([[1, 2]])) == [((0, 1, 1), (1, 2, 2))]


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        self.numel = max(self.numel, *sizes, 0)
        return found


def test_no_tensor_has_more_than_a_row() -> None:
    length = 4096
    ids = (torch.arange(length) // 64)[None]
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    with Largest() as seen:
        composite.attention(q, k, v, documents=ids, kind="causal", scale=0.25).sum().backward()
    assert seen.numel == q.numel()
