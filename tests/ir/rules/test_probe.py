"""Ops without a rule: what trying finds out, and what it must not believe."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.ir.capture.capture import capture
from autopar.ir.graph import op_nodes
from autopar.ir.mesh import Mesh
from autopar.ir.rules import MissingRuleWarning, rule_for
from autopar.ir.rules.call import call_of
from autopar.ir.rules.isolated import isolated
from autopar.ir.rules.probe import probe

aten = torch.ops.aten


@pytest.fixture(scope="module")
def library() -> Iterator[Callable[[str, Callable[..., Any]], Any]]:
    """Defines ops of a library that no rule knows."""
    library = torch.library.Library("autopar_probe_test", "DEF")

    def define(schema: str, function: Callable[..., Any]) -> Any:
        name = library.define(schema)
        library.impl(name, function, "CompositeImplicitAutograd")
        return getattr(torch.ops.autopar_probe_test, name).default

    yield define
    library._destroy()


def node_of(target: Any, *args: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> fx.Node:
    graph = fx.Graph()
    lifted = []
    for number, arg in enumerate(args):
        if isinstance(arg, tuple):
            node = graph.placeholder(f"x{number}")
            node.meta["val"] = torch.empty(arg, device="meta")
            arg = node
        lifted.append(arg)
    node = graph.call_function(target, tuple(lifted))
    values = tuple(torch.empty(shape, device="meta", dtype=dtype) for shape in shapes)
    node.meta["val"] = values if len(values) > 1 else values[0]
    node.meta["source"] = "model.py:7 in forward: y = op(x)"
    return node


def test_matrix_product(library: Any) -> None:
    target = library("product(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.einsum("bmk,kn->bmn", x, y).clone())
    node = node_of(target, (4, 6, 8), (8, 10), shapes=[(4, 6, 10)])
    rule = probe(call_of(node))
    assert rule is not None
    (b, m, k), (k2, n) = rule.operands
    assert (b, m, n) == rule.results[0]
    assert k == k2
    assert rule.summed == {*k}
    assert set(rule.shardable()) == {*b, *m, *k, *n}


def test_rows_are_independent_and_columns_are_not(library: Any) -> None:
    target = library("normalise(Tensor x) -> Tensor", lambda x: x / x.sum(-1, keepdim=True))
    rule = probe(call_of(node_of(target, (8, 8), shapes=[(8, 8)])))
    assert rule is not None
    assert rule.shardable() == rule.operands[0][0] == rule.results[0][0]


def test_large_sizes_are_tried_on_small_ones(library: Any) -> None:
    target = library("heads(Tensor x, int size) -> (Tensor, Tensor)", lambda x, size: (x[..., :size].tanh(), x.sum(-1)))
    node = node_of(target, (4096, 1024), 512, shapes=[(4096, 512), (4096,)])
    rule = probe(call_of(node))
    assert rule is not None
    (rows,) = rule.shardable()
    assert rule.sizes[rows] == 4096
    assert rule.results == (((rows,), rule.results[0][1]), ((rows,),))


def test_a_sum_of_positive_numbers_only_is_not_believed(library: Any) -> None:
    target = library("clamped(Tensor x) -> Tensor", lambda x: x.sum().clamp(min=-0.01))
    assert probe(call_of(node_of(target, (8,), shapes=[()]))) is None


def test_counts_are_not_sums(library: Any) -> None:
    target = library("largest(Tensor x) -> Tensor", lambda x: x.argmax())
    assert probe(call_of(node_of(target, (8,), shapes=[()], dtype=torch.int64))) is None


def test_a_kernel_that_trusts_its_sizes_is_not_given_wrong_ones() -> None:
    """Half of one operand alone makes it write past the end of the other; the heap that it breaks is not ours."""
    weight = nn.utils.parametrizations.weight_norm(nn.Linear(64, 256))
    node = next(n for n in op_nodes(capture(weight, (torch.randn(8, 64),)).graph) if "_weight_norm" in n.name)
    rule = probe(call_of(node))
    assert rule is not None
    assert rule.shardable() == rule.operands[0][0] == rule.operands[1][0] == rule.results[0][0]


def test_an_op_that_ends_its_process_is_repeated() -> None:
    library = torch.library.Library("autopar_probe_deadly", "DEF")
    library.define("crash(Tensor x, Tensor y) -> Tensor")
    library.impl("crash", lambda x, y: os.abort() if len(x) != 8 or len(y) != 8 else x + y, "CPU")
    library.impl("crash", lambda x, y: torch.empty_like(x), "Meta")  # does not check either
    node = node_of(torch.ops.autopar_probe_deadly.crash.default, (8,), (8,), shapes=[(8,)])
    with pytest.warns(MissingRuleWarning, match="every rank repeats it"):
        assert rule_for(node).shardable() == ()
    library._destroy()


def test_an_op_without_a_rule_costs_its_bytes_and_its_products(library: Any) -> None:
    def refuse(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    target = library("fused(Tensor x, Tensor a, Tensor b) -> Tensor", refuse)
    node = node_of(target, (64, 32), (32, 48), (48, 8), shapes=[(8,)])
    with pytest.warns(
        MissingRuleWarning, match=r"fused.*every rank repeats it; priced by its bytes and an estimate of"
    ):
        rule = rule_for(node)
    assert 2 * 64 * 32 * 48 <= rule.flops <= 1.1 * 2 * 64 * 32 * 48
    seconds = OpCost.of(node, rule, make_cluster("h100-sxm", 1).device).time((), Mesh(()))
    assert seconds.forward_s > 0 and seconds.backward_s > 0


def test_isolated_calls_run_a_backward_after_one_has_run_here() -> None:
    def slope() -> float:
        x = torch.ones((), requires_grad=True)
        (3.0 * x).backward()
        assert x.grad is not None
        return float(x.grad)

    assert slope() == 3.0
    assert isolated(slope, limit_s=60.0) == 3.0


@pytest.mark.skipif(not hasattr(ctypes.PyDLL(None), "_Fork"), reason="this C library has no _Fork")
def test_no_library_hears_of_an_isolated_call() -> None:
    """As a build of torch for GPUs would, which then refuses every backward in the copy."""
    # In a process of its own: the handler cannot be taken back, and runs Python in every copy that is forked later.
    script = """
import ctypes, torch
from autopar.ir.rules.isolated import isolated
torch.version.cuda = "13.0"
heard = []
handler = ctypes.CFUNCTYPE(None)(lambda: heard.append(True))
ctypes.PyDLL(None).__register_atfork(None, None, handler, None)
print(isolated(lambda: list(heard), limit_s=60.0))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_isolated_calls_answer_fail_die_and_hang() -> None:
    big = torch.arange(100_000).tolist()
    assert isolated(lambda: big, limit_s=60.0) == big
    assert isolated(lambda: 1 // 0, limit_s=60.0) is None
    assert isolated(os.abort, limit_s=60.0) is None
    assert isolated(lambda: time.sleep(60.0), limit_s=0.1) is None


def test_random_and_failing_ops_are_repeated(library: Any) -> None:
    noise = library("noise(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x))
    assert probe(call_of(node_of(noise, (8,), shapes=[(8,)]))) is None

    def refuse(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    refusing = library("refusing(Tensor x) -> Tensor", refuse)
    node = node_of(refusing, (8, 4), shapes=[(8, 4)])
    with pytest.warns(MissingRuleWarning, match=r"refusing .*model\.py:7 in forward.*every rank repeats it"):
        rule = rule_for(node)
    assert rule.shardable() == ()
    assert rule.flops > 0


def test_the_backward_counts(library: Any) -> None:
    class Mixed(torch.autograd.Function):
        """Rows go through unchanged, their gradients are averaged."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.mean(0, keepdim=True).expand_as(grad)

    target = library("mixed(Tensor x) -> Tensor", Mixed.apply)
    rule = probe(call_of(node_of(target, (8, 6), shapes=[(8, 6)])))
    assert rule is not None
    assert rule.shardable() == rule.operands[0][1]


@pytest.mark.parametrize(
    ("target", "args", "shapes", "batch"),
    [
        (aten.cdist.default, ((4, 6, 3), (4, 8, 3)), [(4, 6, 8)], 0),
        (aten.linalg_cross.default, ((4, 3), (4, 3)), [(4, 3)], 0),
        (aten.logaddexp.default, ((4, 3), (4, 3)), [(4, 3)], 0),
    ],
)
def test_aten_ops_outside_the_tables(target: Any, args: tuple[Any, ...], shapes: list[Any], batch: int) -> None:
    rule = probe(call_of(node_of(target, *args, shapes=shapes)))
    assert rule is not None
    assert rule.results[0][batch] == rule.operands[0][batch] != ()
    assert rule.results[0][batch][0] in rule.shardable()


def test_a_custom_op_whose_backward_is_not_linear() -> None:
    @torch.library.custom_op("autopar_probe_own::limited", mutates_args=())
    def limited(x: Tensor) -> Tensor:
        return x.clone()

    limited.register_fake(torch.empty_like)
    limited.register_autograd(lambda ctx, grad: grad / grad.norm(dim=-1, keepdim=True))
    node = node_of(torch.ops.autopar_probe_own.limited.default, (8, 6), shapes=[(8, 6)])
    with pytest.warns(MissingRuleWarning, match="probing found"):
        rule = rule_for(node)
    ((rows, columns),) = rule.operands
    assert set(rule.shardable()) == set(rows)
    assert set(columns) <= rule.blocked
    assert rule.nonlinear


def test_a_dimension_that_becomes_longer_is_no_factor() -> None:
    window = ([3, 1], [1, 1], [1, 0], [1, 1])
    rule = probe(call_of(node_of(aten.im2col.default, (4, 16, 8, 1), *window, shapes=[(4, 48, 8)])))
    assert rule is not None
    assert rule.operands[0][0] == rule.results[0][0] != ()
    assert rule.operands[0][1] != rule.results[0][1]
