"""The entry point: signatures, several results, warnings, local sizes, speed."""

from __future__ import annotations

import operator
import time
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.ir.errors import UnsupportedOp
from autopar.ir.graph import op_nodes, source, tensor_operands
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for
from autopar.ir.rules.sizes import local_arguments

aten = torch.ops.aten


class Builder:
    """A graph with meta values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty(shape, device="meta", dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        real_args, real_kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        node.meta["val"] = target(*real_args, **real_kwargs)
        return node


def test_results_are_reached_through_getitem() -> None:
    b = Builder()
    split = b.call(aten.split.Tensor, b.input(8, 6), 2, 1)
    part = b.call(operator.getitem, split, 2)
    total = b.call(aten.sum.default, part)
    assert source(part) == (split, 2)
    assert source(total) == (total, 0)
    assert tensor_operands(total) == [part]
    assert tensor_operands(part) == []
    assert list(op_nodes(b.graph)) == [split, total]
    assert len(rule_for(split).results) == 3
    with pytest.raises(UnsupportedOp, match="source"):
        rule_for(part)


def test_equal_ops_share_a_rule() -> None:
    b = Builder()
    x, weight = b.input(8, 6), b.input(4, 6)
    first, second = b.call(aten.linear.default, x, weight), b.call(aten.linear.default, x, weight)
    assert rule_for(first) is rule_for(second)
    other = b.call(aten.linear.default, b.input(16, 6), weight)
    assert rule_for(other).sizes["d0"] == 16


def test_work_is_counted() -> None:
    b = Builder()
    x = b.input(8, 6)
    assert rule_for(b.call(aten.linear.default, x, b.input(4, 6))).flops == 2 * 8 * 6 * 4
    q = b.input(2, 4, 16, 8)
    full = rule_for(b.call(composite.attention, q, q, q, kind="full", scale=1.0)).flops
    causal = rule_for(b.call(composite.attention, q, q, q, kind="causal", scale=1.0)).flops
    assert full == 2 * causal > 4 * 2 * 4 * 16 * 16 * 8
    assert rule_for(b.call(aten.view.default, x, [48])).flops == 0


def test_dropout_is_lowered_even_where_it_is_not_sharded() -> None:
    b = Builder()
    rule = rule_for(b.call(aten.native_dropout.default, b.input(8, 6), 0.1, True))
    assert rule.lowered == {"*": "random"}
    assert rule.shardable() == ("d0", "d1")
    assert rule_for(b.call(aten.native_dropout.default, b.input(8, 6), 0.0, True)).lowered == {}
    q = b.input(2, 4, 16, 8)
    rule = rule_for(b.call(composite.attention, q, q, q, kind="causal", scale=1.0, dropout_p=0.1))
    assert set(rule.lowered.values()) == {"attention"}


def test_batch_statistics_couple_the_batch() -> None:
    b = Builder()
    x, channels = b.input(8, 4, 6, 6), b.input(4)
    args = (channels, channels, channels, channels)
    train = rule_for(b.call(aten._native_batch_norm_legit_functional.default, x, *args, True, 0.1, 1e-5))
    assert train.couples == {"b", "y0", "y1"}
    assert train.result(1, "b").is_replicate()
    evaluate = rule_for(b.call(aten.batch_norm.default, x, *args, False, 0.1, 1e-5, False))
    assert evaluate.couples == frozenset()


@pytest.mark.parametrize(
    ("target", "args", "shape", "expected"),
    [
        (aten.view.default, ([8, 2, -1],), (4, 2, 3), ([4, 2, 3],)),
        (aten.expand.default, ([4, -1, -1],), (2, 8, 6), ([2, 8, 6],)),
        (aten.repeat.default, ([4, 1, 1],), (2, 8, 6), ([2, 1, 1],)),
        (aten.repeat.default, ([4, 1, 1],), (4, 4, 6), ([4, 1, 1],)),
        (aten.new_zeros.default, ([4, 2],), (2, 2), ([2, 2],)),
        (aten.sum.dim_IntList, ([1],), (4,), ([1],)),
    ],
)
def test_sizes_are_rewritten(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], expected: Any) -> None:
    b = Builder()
    node = b.call(target, b.input(8, 6), *args)
    assert local_arguments(node, shape) == ((node.args[0], *expected), {})


def test_keyword_sizes_are_rewritten() -> None:
    b = Builder()
    node = b.graph.call_function(aten.full.default, ([4, 2], 1.0), {"dtype": torch.float32})
    node.meta["val"] = torch.empty(4, 2, device="meta")
    assert local_arguments(node, (2, 2)) == (([2, 2], 1.0), {"dtype": torch.float32})


def test_groups_of_a_convolution_are_rewritten() -> None:
    b = Builder()
    node = b.call(aten.conv1d.default, b.input(2, 8, 6), b.input(8, 2, 3), None, [1], [0], [1], 4)
    assert local_arguments(node, (2, 4, 4))[0][-1] == 2


def test_thousands_of_nodes_take_well_under_a_second() -> None:
    b = Builder()
    x = b.input(8, 16, 64)
    nodes = []
    for _ in range(700):
        h = b.call(aten.linear.default, x, b.input(64, 64))
        h = b.call(aten.view.default, h, [8, 16, 4, 16])
        h = b.call(aten.transpose.int, h, 1, 2)
        h = b.call(aten.mul.Tensor, h, 0.5)
        h = b.call(aten.transpose.int, h, 1, 2)
        h = b.call(aten.view.default, h, [8, 16, 64])
        x = b.call(aten.add.Tensor, x, h)
    nodes = list(op_nodes(b.graph))
    start = time.process_time()
    for node in nodes:
        rule_for(node)
    assert len(nodes) == 4900
    assert time.process_time() - start < 1.0
