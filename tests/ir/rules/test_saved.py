"""What autograd keeps, against the hooks that tell what it does keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.ir.graph import tensor_operands, tensor_results
from autopar.ir.ops import composite
from autopar.ir.rules.saved import Saved, saved_for_backward

aten = torch.ops.aten


def r(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def plain(value: Tensor) -> Tensor:
    return value.detach()


def measured(target: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[fx.Node, set[int], set[int], float]:
    """The node, operands and results kept (by storage), and bytes of other storages."""
    graph = fx.Graph()
    packed: list[Tensor] = []

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder("x")
        node.meta["val"] = leaf
        return node

    node = graph.call_function(target, *pytree.tree_map(lift, (args, kwargs)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        node.meta["val"] = target(*args, **kwargs)
    storages = {t.untyped_storage().data_ptr(): t for t in packed if t.numel()}
    operands = {n: o.meta["val"].untyped_storage().data_ptr() for n, o in enumerate(tensor_operands(node))}
    results = {n: t.untyped_storage().data_ptr() for n, t in enumerate(tensor_results(node))}
    known = {*operands.values(), *results.values()}
    extra = sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in known)
    return (
        node,
        {n for n, pointer in operands.items() if pointer in storages},
        {n for n, pointer in results.items() if pointer in storages},
        extra,
    )


CASES: list[tuple[Any, ...]] = [
    (aten.linear.default, r(2, 4, 6), r(8, 6), r(8)),
    (aten.linear.default, plain(r(4, 6)), r(8, 6)),
    (composite.columns_linear, r(2, 4, 6), r(6, 8), r(8)),
    (aten.linear.default, r(4, 6), plain(r(8, 6))),
    (aten.mm.default, r(4, 6), r(6, 8)),
    (aten.addmm.default, r(8), r(4, 6), r(6, 8)),
    (aten.mul.Tensor, r(4, 6), r(6)),
    (aten.mul.Tensor, r(4, 6), plain(r(6))),
    (aten.mul.Tensor, r(4, 6), 2.0),
    (aten.div.Tensor, r(4, 6), r(6)),
    (aten.div.Tensor, r(4, 6), plain(r(6))),
    (aten.add.Tensor, r(4, 6), r(6)),
    (aten.sum.dim_IntList, r(4, 6), [1]),
    (aten.mean.dim, r(4, 6), [1]),
    (aten.view.default, r(4, 6), [24]),
    (aten.cat.default, [r(4, 6), r(4, 2)], 1),
    (aten.slice.Tensor, r(4, 6), 1, 0, 2),
    (aten.gelu.default, r(4, 6)),
    (aten.silu.default, r(4, 6)),
    (aten.relu.default, r(4, 6)),
    (aten.tanh.default, r(4, 6)),
    (aten.sigmoid.default, r(4, 6)),
    (aten.pow.Tensor_Scalar, r(4, 6), 2),
    (aten.rsqrt.default, r(4, 6)),
    (aten.exp.default, r(4, 6)),
    (aten.cos.default, r(4, 6)),
    (aten.softmax.int, r(4, 6), 1),
    (aten.log_softmax.int, r(4, 6), 1),
    (aten.logsumexp.default, r(4, 6), [1]),
    (aten.amax.default, r(4, 6), [1]),
    (aten.max.dim, r(4, 6), 1),
    (aten.topk.default, r(4, 6), 2),
    (aten.where.self, torch.ones(4, 6) > 0, r(4, 6), r(4, 6)),
    (aten.masked_fill.Scalar, r(4, 6), torch.ones(4, 6) > 0, 0.0),
    (aten.embedding.default, r(8, 6), torch.arange(4)),
    (aten.scatter_reduce.two, r(4, 6), 1, torch.zeros(4, 2, dtype=torch.int64), r(4, 2), "sum"),
    (aten.scatter_reduce.two, r(4, 6), 1, torch.zeros(4, 2, dtype=torch.int64), r(4, 2), "amax"),
    (aten.gather.default, r(4, 6), 1, torch.zeros(4, 2, dtype=torch.long)),
    (aten.index.Tensor, r(4, 6), [torch.arange(3)]),
    (aten.layer_norm.default, r(4, 6), [6], r(6), r(6)),
    (aten.conv2d.default, r(2, 4, 6, 6), r(6, 4, 3, 3), r(6)),
    (aten.max_pool2d_with_indices.default, r(2, 4, 6, 6), [2, 2]),
    (aten.mse_loss.default, r(4, 6), r(4, 6)),
    (aten.native_dropout.default, r(4, 6), 0.5, True),
    (aten.var.correction, r(4, 6), [1]),
    (aten.clamp.default, r(4, 6), -1.0, 1.0),
    (aten.native_layer_norm.default, r(4, 6), [6], r(6), r(6), 1e-5),
    (aten.max_pool2d.default, r(2, 4, 6, 6), [2, 2]),
    (
        aten._native_batch_norm_legit_functional.default,
        *(r(4, 2, 6), r(2), r(2), torch.zeros(2), torch.ones(2)),
        *(True, 0.1, 1e-5),
    ),
]


@pytest.mark.parametrize("args", CASES, ids=lambda case: getattr(case[0], "__name__", str(case[0])))
def test_kept_tensors(args: tuple[Any, ...]) -> None:
    node, operands, results, extra = measured(*args)
    saved = saved_for_backward(node, lambda n: any(t.requires_grad for t in pytree.tree_leaves(n.meta["val"])))
    # Running statistics and biases of a norm are small and may be kept for no use.
    assert set(saved.operands) | operands == set(saved.operands)
    assert sum(_numel(node, p) for p in set(saved.operands) - operands) <= 4
    assert set(saved.results) == results
    assert saved.extra_bytes == pytest.approx(extra, abs=16)


def _numel(node: fx.Node, position: int) -> int:
    return tensor_operands(node)[position].meta["val"].numel()


def test_attention_keeps_operands_result_and_one_number_a_row() -> None:
    q, k, v = r(2, 4, 8, 16), r(2, 4, 8, 16), r(2, 4, 8, 16)
    node, operands, results, extra = measured(composite.attention, q, k, v, kind="causal", scale=0.25)
    saved = saved_for_backward(node)
    assert (set(saved.operands), set(saved.results)) == (operands, results) == ({0, 1, 2}, {0})
    assert saved.extra_bytes == pytest.approx(extra, abs=64)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("mask", [None, "bool", "bias"])
@pytest.mark.parametrize(("kind", "window"), [("causal", None), ("sliding", 4), ("sliding", 12), ("full", None)])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_keeps_what_its_kernel_takes(
    heads: int, mask: str | None, kind: str, window: int | None, sinks: bool
) -> None:
    q, k, v = r(2, 4, 24, 32), r(2, heads, 24, 32), r(2, heads, 24, 32)
    masks = {None: None, "bool": torch.ones(2, 1, 1, 24, dtype=torch.bool), "bias": torch.zeros(2, 1, 24, 24)}
    options = {"kind": kind, "window": window, "scale": 0.2}
    node, operands, results, extra = measured(
        composite.attention, q, k, v, masks[mask], r(4) if sinks else None, **options
    )
    saved = saved_for_backward(node)
    ours, theirs = (
        beside + sum(4 * _numel(node, position) for position in own) + 4 * node.meta["val"].numel() * len(results)
        for beside, own, results in ((saved.extra_bytes, saved.operands, saved.results), (extra, operands, results))
    )
    assert ours == pytest.approx(theirs, rel=0.09), (saved, operands, results, extra)


def test_cross_entropy_keeps_log_probabilities_and_targets() -> None:
    logits, target = r(2, 4, 6), torch.zeros(2, 4, dtype=torch.long)
    node, operands, _, extra = measured(composite.cross_entropy, logits, target)
    saved = saved_for_backward(node)
    assert set(saved.operands) == operands == {1}
    assert saved.extra_bytes == pytest.approx(extra, abs=16)


def test_a_recurrent_layer_keeps_gates_and_states_of_all_steps() -> None:
    x, hx = r(2, 5, 3), [r(1, 2, 4), r(1, 2, 4)]
    node, *_ = measured(aten.lstm.input, x, hx, [r(16, 3), r(16, 4)], False, 1, 0.0, True, False, True)
    saved = saved_for_backward(node)
    assert (set(saved.operands), saved.results) == ({0, 1, 2, 3, 4}, (0,))
    assert saved.extra_bytes == 2 * 5 * (4 * 4 + 4) * 4


def test_moe_keeps_the_activations_of_each_choice() -> None:
    x, up, down = r(64, 6), r(3, 16, 6), r(3, 6, 8)
    index, weight = torch.randint(0, 3, (64, 2)), r(64, 2)
    node, *_, extra = measured(composite.moe, x, index, weight, up, down, activation="silu", gated=True)
    saved = saved_for_backward(node)
    # The rest are the sorting indices, 8 bytes a choice each.
    assert saved.extra_bytes <= extra <= 1.4 * saved.extra_bytes


def test_moe_keeps_what_an_expression_between_its_products_does() -> None:
    x, up, down = r(64, 6), r(3, 32, 6), r(3, 6, 16)
    index, weight = torch.randint(0, 3, (64, 2)), r(64, 2)
    gate = "clamp(gate, None, 7.0)"
    activation = f"mul(add(clamp(value, -7.0, 7.0), 1), mul({gate}, sigmoid(mul({gate}, 1.702))))"
    node, *_, extra = measured(composite.moe, x, index, weight, up, down, activation=activation, gated=True)
    saved = saved_for_backward(node)
    assert saved.extra_bytes == 4 * 128 * (6 + 32 + 5 * 16 + 6)
    assert saved.extra_bytes <= extra <= 1.2 * saved.extra_bytes


def test_nothing_is_kept_without_a_gradient() -> None:
    node, *_ = measured(aten.mul.Tensor, plain(r(4)), plain(r(4)))
    assert saved_for_backward(node, lambda operand: False) == Saved()
    node, *_ = measured(aten.eq.Tensor, plain(r(4)), plain(r(4)))
    assert saved_for_backward(node) == Saved()


def test_copies_are_in_the_precision_of_compute() -> None:
    x, up, down = r(64, 6), r(3, 16, 6), r(3, 6, 8)
    index, weight = torch.randint(0, 3, (64, 2)), r(64, 2)
    node, *_ = measured(composite.moe, x, index, weight, up, down, activation="silu", gated=True)
    assert saved_for_backward(node, precision="bf16").extra_bytes == saved_for_backward(node).extra_bytes / 2
    q, k = r(2, 4, 24, 32), r(2, 2, 24, 32)
    node, *_ = measured(composite.attention, q, k, k, kind="sliding", window=4, scale=0.2)
    whole, narrow = saved_for_backward(node), saved_for_backward(node, precision="bf16")
    assert narrow.copied_bytes == whole.copied_bytes / 2
    # Normalisers stay in float32.
    assert narrow.extra_bytes - narrow.copied_bytes == whole.extra_bytes - whole.copied_bytes
