"""Every rule, every choice: the op on shards against the whole op, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.ir.graph import tensor_operands
from autopar.ir.rule import Choice, FactorRule
from autopar.ir.rules import known_rule
from autopar.ir.rules.call import call_of
from autopar.ir.rules.proof import Run, check, runner
from tests.ir.rules.proved.arrangement import ARRANGEMENT
from tests.ir.rules.proved.elementwise import ELEMENTWISE
from tests.ir.rules.proved.operands import r
from tests.ir.rules.proved.products import PRODUCTS

aten = torch.ops.aten


def node_of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[fx.Node, list[Tensor]]:
    """A node with real tensors as its values."""
    graph = fx.Graph()
    count = iter(range(100))

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"x{next(count)}")
        node.meta["val"] = leaf
        return node

    new_args, new_kwargs = pytree.tree_map(lift, (args, kwargs))
    node = graph.call_function(target, new_args, new_kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node, [operand.meta["val"] for operand in tensor_operands(node)]


def lowered_run(node: fx.Node, rule: FactorRule, choice: Choice, num_parts: int) -> Run | None:
    """The lowerings that need no communication, done here as the table in ``rules`` words them."""
    run = runner(node)
    name = rule.lowered.get(choice or "")

    def mean(values: Sequence[Tensor], shape: Sequence[int] | None) -> list[Tensor]:
        return [result / num_parts for result in run(values, shape)]

    def bias(values: Sequence[Tensor], shape: Sequence[int] | None) -> list[Tensor]:
        bound = call_of(node).bound()
        position = (bound["bias"] if "bias" in bound else bound["self"]).position
        return run([v / num_parts if p == position else v for p, v in enumerate(values)], shape)

    return {"mean": mean, "bias": bias}.get(name or "")


# Operands that an op has no gradient for.
NO_GRADIENT = {
    "aten::_native_batch_norm_legit_functional": ("running_mean", "running_var"),
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::cross_entropy_loss": ("weight",),
}

CASES = [*ELEMENTWISE, *PRODUCTS, *ARRANGEMENT]


def name_of(number: int) -> str:
    _, target, args, _ = CASES[number]
    shapes = "-".join("x".join(map(str, a.shape)) for a in args if isinstance(a, Tensor))
    return f"{number}-{getattr(target, '__name__', target)}-{shapes}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=name_of)
def test_shards_recombine_to_the_whole(number: int) -> None:
    """``!`` marks factors whose lowering communicates; those are proved with the lowerings."""
    expected, target, args, kwargs = CASES[number]
    node, values = node_of(target, *args, **kwargs)
    rule = known_rule(call_of(node))
    assert rule is not None
    words = expected.split()
    communicating = {w[:-1] for w in words if w.endswith("!")}
    assert set(rule.shardable()) == {w.rstrip("!") for w in words if w != "+"}
    assert len(rule.linear) == words.count("+")
    lowered = {f for f, name in rule.lowered.items() if name not in ("mean", "bias")}
    assert lowered <= communicating | set(rule.blocked) | set(rule.joint)
    run = runner(node)
    bound = call_of(node).bound()
    names = NO_GRADIENT.get(call_of(node).name, ())
    constants = [bound[name].position for name in names if bound[name] is not None]
    for choice in rule.choices():
        if choice in communicating or choice in rule.joint:
            continue
        for num_parts in (2, 3):
            if choice in rule.sizes and rule.sizes[choice] % num_parts:
                continue
            local = lowered_run(node, rule, choice, num_parts)
            assert check(run, values, rule, choice, num_parts=num_parts, run_local=local, constants=constants) is None


@pytest.mark.parametrize("choice", ["d0", "d1"])
def test_gradients_of_a_layer_norm(choice: Choice) -> None:
    tensors = (r(2, 4, 6), r(2, 4, 6), [6], r(2, 4, 1), r(2, 4, 1), r(6), r(6), [True, True, True])
    node, values = node_of(aten.native_layer_norm_backward.default, *tensors)
    rule = known_rule(call_of(node))
    assert rule is not None
    # torch differentiates through the statistics as functions of the input.
    assert check(runner(node), values, rule, choice, constants=(2, 3)) is None
