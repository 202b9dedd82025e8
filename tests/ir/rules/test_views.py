"""Common refinements of two shapes, and reshapes of shards."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.ir.rules import rule_for
from autopar.ir.rules.factors import Factors
from autopar.ir.rules.proof import check, runner
from autopar.ir.rules.views import refine

aten = torch.ops.aten


@st.composite
def shapes_of_one_tensor(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes with the same number of elements."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=6))

    def cut() -> list[int]:
        order = draw(st.permutations(primes))
        shape = [1]
        for prime in order:
            if draw(st.booleans()):
                shape.append(prime)
            else:
                shape[-1] *= prime
        return shape

    return cut(), cut()


@given(shapes_of_one_tensor())
@settings(max_examples=60)
def test_reshape_of_shards(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.arange(prod(before), dtype=torch.float64).reshape(before)
    node = graph.call_function(aten.view.default, (x, after))
    node.meta["val"] = x.meta["val"].view(after)
    rule = rule_for(node)
    for choice in rule.choices():
        size = rule.sizes.get(choice or "", 6)
        for num_parts in {2, 3, size}:
            if size % num_parts == 0:
                assert check(runner(node), [x.meta["val"]], rule, choice, num_parts=num_parts) is None


def test_refinements() -> None:
    assert refine(Factors(), (8, 6), (4, 2, 6)) == ((("d0", "d1"), ("d2",)), (("d0",), ("d1",), ("d2",)))
    assert refine(Factors(), (6, 4), (2, 12)) == ((("d0", "d1"), ("d2",)), (("d0",), ("d1", "d2")))
    assert refine(Factors(), (4, 1, 6), (4, 6, 1)) == ((("d0",), (), ("d1",)), (("d0",), ("d1",), ()))
    factors = Factors()
    assert refine(factors, (6, 4), (4, 6)) == ((("d0", "_1"), ("_2",)), (("d0", "_3"), ("_4",)))
    assert factors.sizes["d0"] == 2
    assert refine(Factors(), (0, 4), (4, 0)) is None
