"""Every rule, every choice: the op on shards against the whole op, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.ir import ops
from autopar.ir.graph import tensor_operands
from autopar.ir.rule import Choice, FactorRule
from autopar.ir.rules import known_rule
from autopar.ir.rules.call import call_of
from autopar.ir.rules.proof import Run, check, runner

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def c(*shape: int) -> Tensor:
    return torch.complex(r(*shape), r(*shape))


def pos(*shape: int) -> Tensor:
    return r(*shape).abs() + 0.1


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def bools(*shape: int) -> Tensor:
    return r(*shape) > 0


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


# (expected shardable factors and number of linear sets, op, arguments)
Case = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def case(expected: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    return expected, target, args, kwargs


POINTWISE = [
    case("d0 d1 +", aten.add.Tensor, r(4, 6), r(6)),
    case("d0 d1 +", aten.sub.Tensor, r(4, 1), r(4, 6), alpha=2),
    case("d0", aten.add.Tensor, r(4), 1.0),
    case("d0 d1 + +", aten.mul.Tensor, r(4, 6), r(4, 1)),
    case("d0 +", aten.mul.Tensor, r(4), 3.0),
    case("d0 +", aten.div.Tensor, r(4), pos(4)),
    case("d0", aten.div.Tensor_mode, r(4), pos(4), rounding_mode="floor"),
    case("d0 +", aten.neg.default, r(4)),
    case("d0 +", aten._to_copy.default, r(4), dtype=torch.float64),
    case("d0", aten._to_copy.default, r(4), dtype=torch.int64),
    case("d0 +", aten.clone.default, r(4)),
    case("d0 d1", aten.gelu.default, r(4, 6)),
    case("d0 d1", aten.silu.default, r(4, 6)),
    case("d0", aten.pow.Tensor_Scalar, pos(4), 2.5),
    case("d0", aten.rsqrt.default, pos(4)),
    case("d0 d1", aten.maximum.default, r(4, 6), r(6)),
    case("d0 d1", aten.max.other, r(4, 6), r(6)),
    case("d0 d1", aten.eq.Tensor, ints(3, 4, 1), ints(3, 1, 6)),
    case("d0", aten.ne.Scalar, ints(3, 4), 1),
    case("d0 d1", aten.logical_and.default, bools(4, 6), bools(6)),
    case("d0 d1 +", aten.where.self, bools(4, 6), r(4, 6), r(6)),
    case("d0 +", aten.where.ScalarOther, bools(4), r(4), 0),
    case("d0", aten.where.ScalarOther, bools(4), r(4), 1),
    case("d0 +", aten.masked_fill.Scalar, r(4), bools(4), 0),
    case("d0", aten.masked_fill.Scalar, r(4), bools(4), -1.0),
    case("d0 d1 +", aten.lerp.Scalar, r(4, 6), r(4, 6), 0.3),
    case("d0", aten.clamp.default, r(4), -0.5, 0.5),
    case("d0", aten.addcmul.default, r(4), r(4), r(4)),
    case("d0", aten.floor_divide.default, ints(9, 4), 2),
    case("d0", aten.hardswish.default, r(4)),
    case("d0", aten.glu.default, r(4, 6), 1),
    case("d0 c d2", aten.prelu.default, r(4, 6, 2), r(6)),
]

REDUCE = [
    case("d0 d1 +", aten.sum.dim_IntList, r(4, 6), [1], True),
    case("d0 d1 +", aten.sum.default, r(4, 6)),
    case("d0 d1 +", aten.sum.dim_IntList, ints(4, 4, 6), [0]),
    case("d0 d1", aten.sum.default, bools(4, 6)),
    case("d0 d1 +", aten.mean.dim, r(4, 6), [-1], True),
    case("d0 d1 +", aten.mean.default, r(4, 6)),
    case("d0", aten.amax.default, r(4, 6), [1]),
    case("d0", aten.max.dim, r(4, 6), 1),
    case("d0", aten.argmax.default, r(4, 6), 1),
    case("", aten.argmax.default, r(4, 6)),
    case("d1", aten.logsumexp.default, r(4, 6), [0]),
    case("d0", aten.var.correction, r(4, 6), [1], correction=1),
    case("d0", aten.var_mean.correction, r(4, 6), [1], correction=0, keepdim=True),
    case("d1", aten.any.dim, bools(4, 6), 0),
    case("d1", aten.linalg_vector_norm.default, r(4, 6), 2, [0]),
    case("d1", aten.prod.dim_int, r(4, 6), 0),
    case("d0 d1", aten.count_nonzero.default, ints(2, 4, 6)),
    case("d0", aten.histc.default, r(8), 4, -1, 1),
    case("", aten.histc.default, r(8), 4),
]

MATMUL = [
    case("d0 d1 k n + +", aten.linear.default, r(2, 4, 6), r(8, 6)),
    case("d0 k n", aten.linear.default, r(4, 6), r(8, 6), r(8)),
    case("k n + +", aten.linear.default, r(6), r(8, 6)),
    case("d0 d1 k n + +", ops.columns_linear, r(2, 4, 6), r(6, 8)),
    case("d0 k n", ops.columns_linear, r(4, 6), r(6, 8), r(8)),
    case("m k n + +", aten.mm.default, r(4, 6), r(6, 8)),
    case("b0 m k n + +", aten.bmm.default, r(2, 4, 6), r(2, 6, 8)),
    case("b0 b1 m k n + +", aten.matmul.default, r(2, 1, 4, 6), r(4, 6, 8)),
    case("m k + +", aten.matmul.default, r(4, 6), r(6)),
    case("k b0 n + +", aten.matmul.default, r(6), r(2, 6, 4)),
    case("k + +", aten.dot.default, r(6), r(6)),
    case("n m k", aten.addmm.default, r(8), r(4, 6), r(6, 8), beta=0.5, alpha=2.0),
    case("b0 m n k", aten.baddbmm.default, r(2, 4, 8), r(2, 4, 6), r(2, 6, 8)),
    case("m k", aten.addmv.default, r(4), r(4, 6), r(6)),
    case("m n + +", aten.outer.default, r(4), r(6)),
    case("b i j k + +", aten.einsum.default, "bij,bjk->bik", [r(2, 4, 6), r(2, 6, 8)]),
    case("b h + + +", aten.einsum.default, "bh,h,b", [r(2, 4), r(4), r(2)]),
]


def attention_case(
    expected: str, heads: int, groups: int, mask: Tensor | None = None, sinks: Tensor | None = None, **options: Any
) -> Case:
    q, k, v = r(2, heads, 4, 6), r(2, groups, 4, 6), r(2, groups, 4, 2)
    return case(expected, ops.attention, q, k, v, mask, sinks, scale=0.4, **options)


ATTENTION = [
    attention_case("b h s", 4, 4, kind="full"),
    attention_case("b h s", 4, 2, kind="full"),
    attention_case("b g s", 4, 1, kind="full"),
    attention_case("b h s!", 4, 2, kind="causal"),
    attention_case("b h s!", 4, 2, kind="sliding", window=2),
    attention_case("b h s", 4, 2, r(2, 1, 4, 4), kind="mask"),
    attention_case("b h s", 4, 4, r(4, 4, 4), kind="mask"),
    attention_case("b h s", 4, 2, r(2, 4, 1, 4), kind="mask"),
    attention_case("b h s!", 4, 2, r(2, 1, 1, 4), kind="causal"),
    attention_case("b h s!", 4, 2, None, r(4), kind="causal"),
    attention_case("b h s", 4, 2, r(2, 1, 1, 4), r(4), kind="mask"),
    case("b h s", aten.scaled_dot_product_attention.default, r(2, 4, 4, 6), r(2, 4, 8, 6), r(2, 4, 8, 6), r(4, 8)),
]

NORM = [
    case("d0 d1", aten.layer_norm.default, r(2, 4, 6), [6], r(6), r(6)),
    case("d0", aten.layer_norm.default, r(2, 4, 6), [4, 6], r(4, 6)),
    case("d0 d1", aten.native_layer_norm.default, r(2, 4, 6), [6], r(6), r(6), 1e-5),
    case("d0 d1", ops.rms_norm, r(2, 4, 6), r(6), 1e-6),
    case("d0 d1", ops.rms_norm, r(2, 4, 6), None, 1e-6),
    case("d0", aten.rms_norm.default, r(4, 6), [6], r(6)),
    case("b g", aten.group_norm.default, r(2, 8, 3, 2), 4, r(8), r(8)),
    case("b g", aten.native_group_norm.default, r(2, 8, 6), r(8), r(8), 2, 8, 6, 4, 1e-5),
    case(
        "b! c y0!",
        aten._native_batch_norm_legit_functional.default,
        r(4, 2, 6),
        r(2),
        r(2),
        r(2),
        pos(2),
        True,
        0.1,
        1e-5,
    ),
    case("b! c y0!", aten.batch_norm.default, r(4, 2, 6), r(2), r(2), r(2), pos(2), True, 0.1, 1e-5, False),
    case("b c y0", aten.batch_norm.default, r(4, 2, 6), r(2), r(2), r(2), pos(2), False, 0.1, 1e-5, False),
    case("b c", aten.instance_norm.default, r(4, 2, 6), r(2), r(2), None, None, True, 0.1, 1e-5, False),
    case("o", aten._weight_norm.default, r(4, 6), r(4, 1), 0),
    case("o", aten._weight_norm_interface.default, r(6, 2, 4), r(1, 1, 4), 2),
    case("", aten._weight_norm.default, r(4, 6), r(), -1),
    case("d0 d2", aten.softmax.int, r(2, 4, 6), 1),
    case("d0", aten._softmax.default, r(2, 4), -1, False),
    case("d0", aten.log_softmax.int, r(2, 4), -1),
]

INDEXING = [
    case("v! h d0 d1 +", aten.embedding.default, r(8, 6), ints(8, 2, 4)),
    case("d0", aten.one_hot.default, ints(4, 6), 4),
    case("d0 i +", aten.gather.default, r(4, 6), 1, ints(6, 4, 2)),
    case("i +", aten.gather.default, r(4, 6), 1, ints(6, 2, 2)),
    case("d1 i +", aten.index_select.default, r(4, 6), 0, ints(4, 8)),
    case("d1 i0 i1 +", aten.index.Tensor, r(4, 6), [ints(4, 2, 4)]),
    case("d0 i0 +", aten.index.Tensor, r(4, 6), [None, ints(6, 2)]),
    case("d0 d3 i0 i1 +", aten.index.Tensor, r(2, 4, 6, 2), [None, ints(4, 4, 1), ints(6, 8)]),
    case("d1 i0 +", aten.index.Tensor, r(2, 4, 6), [ints(2, 4), None, ints(6, 4)]),
    case("d1 +", aten.index_put.default, r(4, 6), [ints(4, 3)], r(3, 6), True),
    case("d1", aten.index_put.default, r(4, 6), [torch.tensor([0, 2])], r(2, 6)),
    case("", aten.index_put.default, r(4), [torch.tensor([0, 2])], r(2)),
    case("d0 +", aten.scatter_add.default, r(4, 6), 1, ints(6, 4, 2), r(4, 2)),
    case("d0 +", aten.scatter_reduce.two, r(4, 6), 1, ints(6, 4, 2), r(4, 2), "sum"),
    case("d0 +", aten.scatter_reduce.two, r(4, 6), 1, ints(6, 4, 2), r(4, 2), "mean", include_self=False),
    case("d0", aten.scatter_reduce.two, r(4, 6), 1, ints(6, 4, 2), r(4, 2), "amax"),
    case("d0", aten.scatter.src, r(4, 6), 1, torch.tensor([[0, 1]]).expand(4, 2), r(4, 2)),
    case("d0", aten.scatter.value, r(4, 6), 1, ints(6, 4, 2), 2.0),
    case("d1 +", aten.index_add.default, r(4, 6), 0, ints(4, 8), r(8, 6)),
    case("d1", aten.index_copy.default, r(4, 6), 0, torch.tensor([0, 2]), r(2, 6)),
    case("d0 d1", aten.bucketize.Tensor, r(4, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)),
]

ARRANGE = [
    case("d0 +", aten.cat.default, [r(4, 6), r(4, 2)], 1),
    case("d0 d1 +", aten.stack.default, [r(4, 6), r(4, 6)], 1),
    case("d0 +", aten.split.Tensor, r(4, 6), 2, 1),
    case("d0 +", aten.split_with_sizes.default, r(4, 6), [2, 4], 1),
    case("d0 +", aten.split_with_sizes.default, r(4, 6), [6], 1),
    case("d0 d1 +", aten.slice.Tensor, r(4, 6), 1, 0, 6),
    case("d0 d1 +", aten.slice.Tensor, r(4, 8), 1, 1, 2**63 - 1, 2),
    case("d0 +", aten.slice.Tensor, r(4, 6), 1, 0, 5, 2),
    case("d0 +", aten.slice.Tensor, r(4, 8), 1, 2, 8, 2),
    case("d0 +", aten.slice.Tensor, r(4, 6), 1, 3, 2**63 - 1),
    case("d0 +", aten.chunk.default, r(4, 6), 3, 1),
    case("d0 d2 +", aten.select.int, r(4, 6, 2), 1, -1),
    case("d0 +", aten.unbind.int, r(4, 6), 1),
    case("d0 +", aten.slice_scatter.default, r(4, 6), r(4, 2), 1, 0, 2),
    case("d0 +", aten.select_scatter.default, r(4, 6), r(4), 1, 2),
    case("d0 +", aten.diagonal_scatter.default, r(4, 6, 6), r(4, 6), 0, 1, 2),
    case("d0 +", aten.pad.default, r(4, 6), [1, 1]),
    case("d0", aten.pad.default, ints(4, 4, 6), [0, 1], "constant", -100.0),
    case("d0 d1 +", aten.pad.default, r(4, 6, 2), [1, 0, 0, 0]),
    case("d0 d1 +", aten.reflection_pad1d.default, r(4, 6, 8), [1, 2]),
    case("d0 +", aten.flip.default, r(4, 6), [1]),
    case("d0 +", aten.roll.default, r(4, 6), [2], [1]),
    case("+", aten.roll.default, r(4, 6), [2]),
    case("d0 +", aten.triu.default, r(4, 6, 6), 1),
    case("d0 +", aten.cumsum.default, r(4, 6), 1),
    case("d0", aten.cumprod.default, r(4, 6), 1),
    case("d0", aten.sort.default, r(4, 6), 1),
    case("d0", aten.topk.default, r(4, 6), 2, 1),
    case("d0", aten.kthvalue.default, r(4, 6), 2, 1),
    case("d1", aten.argsort.default, r(4, 6), 0),
    case("d0 +", aten.diff.default, r(4, 6), 1, -1, r(4, 1)),
    case("d0", aten.cosine_similarity.default, r(4, 6), r(1, 6), 1),
    case("d0 +", aten.unfold.default, r(4, 6), 1, 4, 2),
]

VIEWS = [
    case("d0 d2 +", aten.view.default, r(4, 2, 6), [8, 6]),
    case("d0 d2 +", aten.view.default, r(8, 6), [4, 2, 6]),
    case("d0 +", aten.view.default, r(4, 6), [2, 12]),
    case("d0 +", aten.view.default, r(12, 8), [8, 12]),
    case("d0 d1 +", aten._unsafe_view.default, r(4, 1, 6), [1, 4, 6, 1]),
    case("d0 +", aten.view.default, r(4, 6), [-1]),
    case("d0 d1 d3 +", aten.view.default, r(4, 6, 8), [4, 2, 3, 8]),
    case("d0 d1 +", aten.reshape.default, r(4, 6), [4, 6]),
    case("d0 d1 +", aten.unsqueeze.default, r(4, 6), 1),
    case("d0 d1 +", aten.squeeze.dim, r(4, 1, 6), 1),
    case("d0 d1 d2 +", aten.permute.default, r(2, 4, 6), [2, 0, -2]),
    case("d0 d1 d2 +", aten.transpose.int, r(2, 4, 6), -1, 0),
    case("d0 d1 +", aten.t.default, r(4, 6)),
    case("d0 d1 +", aten.mT.default, r(4, 6)),
    case("d0 d1 d2 +", aten.movedim.int, r(2, 4, 6), 0, 2),
    case("d1 d0 +", aten.expand.default, r(1, 6), [4, -1]),
    case("d2 d0 +", aten.expand.default, r(6), [4, 1, 6]),
    case("d1 r0 +", aten.repeat.default, r(3, 6), [2, 1]),
    case("d0 r1 +", aten.repeat.default, r(4, 1), [1, 2]),
    case("d0 d1 +", aten.repeat_interleave.self_int, r(4, 6), 2, 1),
    case("d0 d1 +", aten.flatten.using_ints, r(4, 6, 2), 1),
    case("d0 +", aten.diagonal.default, r(4, 6, 6), 0, 1, 2),
]

CONV = [
    case("b c o + +", aten.conv2d.default, r(2, 4, 6, 6), r(6, 4, 3, 3), None, [1, 1], [1, 1]),
    case("b c o", aten.conv2d.default, r(2, 4, 6, 6), r(6, 4, 3, 3), r(6), [2, 2], [1, 1]),
    case("b y0 y1 c o", aten.conv2d.default, r(2, 4, 8, 8), r(6, 4, 2, 2), r(6), [2, 2]),
    case("b y0 y1 c o + +", aten.conv2d.default, r(2, 4, 4, 4), r(6, 4, 1, 1)),
    case("b g + +", aten.conv2d.default, r(2, 4, 6, 6), r(8, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 2),
    case("b g", aten.conv1d.default, r(2, 4, 6), r(4, 1, 3), r(4), [1], [1], [1], 4),
    case("b c o", aten.conv1d.padding, r(2, 4, 6), r(6, 4, 3), r(6), [1], "same"),
    case("b c o", aten.conv_transpose2d.input, r(2, 4, 3, 3), r(4, 6, 2, 2), r(6), [2, 2]),
    case("b g", aten.conv_transpose2d.input, r(2, 4, 3, 3), r(4, 3, 2, 2), r(6), [2, 2], [0, 0], [0, 0], 2),
    case("b c o", aten.convolution.default, r(2, 4, 6), r(6, 4, 3), r(6), [1], [0], [1], False, [0], 1),
    case("b c", aten.max_pool2d.default, r(2, 4, 6, 6), [3, 3], [2, 2], [1, 1]),
    case("b c", aten.max_pool2d_with_indices.default, r(2, 4, 6, 6), [2, 2]),
    case("b c +", aten.avg_pool2d.default, r(2, 4, 6, 6), [2, 2]),
    case("b c +", aten.adaptive_avg_pool2d.default, r(2, 4, 6, 6), [1, 1]),
    case("b c +", aten.upsample_bilinear2d.vec, r(2, 4, 3, 3), [6, 6], False, None),
    case("d0 c y x +", aten.pixel_shuffle.default, r(2, 8, 4, 6), 2),
    case("d0 c y x +", aten.pixel_unshuffle.default, r(2, 2, 4, 8), 2),
]

LOSS = [
    case("c!", ops.cross_entropy, r(2, 4, 6), ints(6, 2, 4)),
    case("d0 d1 c!", ops.cross_entropy, r(2, 4, 6), ints(6, 2, 4), reduction="sum"),
    case("d0 d1 c!", ops.cross_entropy, r(2, 4, 6), ints(6, 2, 4), reduction="none", label_smoothing=0.1),
    case("c!", aten.cross_entropy_loss.default, r(8, 6), ints(6, 8)),
    case("d0 d1 c!", aten.cross_entropy_loss.default, r(4, 6, 2), ints(6, 4, 2), None, 2),
    case("d0 d1", aten.cross_entropy_loss.default, r(4, 6, 2), ints(6, 4, 2), pos(6), 0),
    case("d0", aten.cross_entropy_loss.default, r(8, 6), r(8, 6).softmax(1)),
    case("d0 d1", aten.nll_loss_nd.default, r(4, 6, 2), ints(6, 4, 2), None, 2),
    case("d0", aten.nll_loss_nd.default, r(8, 6), ints(6, 8), None, 2),
    case("d0 d1", aten.mse_loss.default, r(4, 6), r(4, 6)),
    case("d0 d1", aten.mse_loss.default, r(4, 6), r(4, 6), 2),
    case("d0 d1", aten.smooth_l1_loss.default, r(4, 6), r(4, 6), 0),
    case("d0", aten.binary_cross_entropy_with_logits.default, r(8), pos(8).clamp(max=1)),
    case("d0 d1", aten.kl_div.default, r(4, 6), r(4, 6).softmax(1), 2),
]


def moe_case(expected: str, tokens: tuple[int, ...], up: int, *biases: Tensor | None, **options: Any) -> Case:
    """Three experts of inner width 8, two a token."""
    routing = ints(3, *tokens, 2), r(*tokens, 2)
    return case(expected, ops.moe, r(*tokens, 6), *routing, r(3, up, 6), r(3, 6, 8), *biases, **options)


OTHER = [
    case("d0 d1", aten.full.default, [4, 6], 2.0),
    case("d0 d1", aten.new_zeros.default, r(3), [4, 6]),
    case("d0 d1", aten.zeros_like.default, r(4, 6)),
    case("", aten.arange.default, 8),
    case("d0 d1", aten.dropout.default, r(4, 6), 0.0, True),
    moe_case("d0 d1 f experts!", (2, 4), 8, activation="gelu", gated=False),
    moe_case("d0 d1 experts!", (2, 4), 16, activation="silu", gated=True),
    moe_case("d0 d1 f experts!", (2, 4), 16, activation="silu", gated=True, interleaved=True),
    moe_case("d0! experts!", (2, 4), 16, activation="silu", gated=True, capacity_factor=1.0),
    moe_case("d0 f experts!", (4,), 8, r(3, 8), activation="relu", gated=False),
    moe_case("d0 f! experts!", (4,), 8, None, r(3, 6), activation="relu", gated=False),
]


def recurrent_case(kind: str, layers: int = 1, *, both: bool = False, first: bool = True, projected: int = 0) -> Case:
    """Six samples of five steps and width 3 through layers of width 4."""
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    directions, out = 2 if both else 1, projected or 4
    params = []
    for layer in range(layers):
        for _ in range(directions):
            params += [r(gates * 4, directions * out if layer else 3), r(gates * 4, out), r(gates * 4), r(gates * 4)]
            params += [r(projected, 4)] if projected else []
    h, c = r(layers * directions, 6, out), r(layers * directions, 6, 4)
    x = r(6, 5, 3) if first else r(5, 6, 3)
    options = (True, layers, 0.0, True, both, first)
    return case("b", getattr(aten, kind).input, x, [h, c] if kind == "lstm" else h, params, *options)


RECURRENT = [
    recurrent_case("lstm"),
    recurrent_case("lstm", 2, both=True, first=False),
    recurrent_case("lstm", 2, projected=2),
    recurrent_case("gru", 2, both=True),
    recurrent_case("rnn_tanh", 2, first=False),
    recurrent_case("rnn_relu"),
    case(
        "",
        aten.rnn_tanh.data,
        r(5, 3),
        torch.tensor([3, 2]),
        r(1, 3, 4),
        [r(4, 3), r(4, 4)],
        False,
        1,
        0.0,
        True,
        False,
    ),
    case("b", aten.lstm_cell.default, r(6, 3), [r(6, 4), r(6, 4)], r(16, 3), r(16, 4), r(16), r(16)),
    case("b", aten.gru_cell.default, r(6, 3), r(6, 4), r(12, 3), r(12, 4)),
    case("b", aten.rnn_tanh_cell.default, r(6, 3), r(6, 4), r(4, 3), r(4, 4), r(4), r(4)),
    case("b", aten.rnn_relu_cell.default, r(6, 3), r(6, 4), r(4, 3), r(4, 4), r(4), r(4)),
]

_LAST = {"include_last_offset": True, "padding_idx": 3}
BAGS = [
    case("v! h b l +", ops.embedding_bag, r(8, 6), ints(8, 4, 3), mode="sum"),
    case("v! h b l + +", ops.embedding_bag, r(8, 6), ints(8, 4, 3), r(4, 3), mode="sum", padding_idx=2),
    case("v! h b +", ops.embedding_bag, r(8, 6), ints(8, 4, 3), mode="mean", padding_idx=2),
    case("h b", ops.embedding_bag, r(8, 6), ints(8, 4, 3), mode="max"),
    case("v! h +", ops.embedding_bag, r(8, 6), ints(8, 12), None, torch.tensor([0, 2, 2, 7]), mode="mean"),
    case("v! h + +", ops.embedding_bag, r(8, 6), ints(8, 12), r(12), torch.tensor([0, 5, 12]), mode="sum", **_LAST),
]

FOURIER = [
    case("d0 +", aten.fft_fft.default, c(6, 4)),
    case("d0 +", aten.fft_fft.default, r(6, 4), 8, 1),
    case("d1 +", aten.fft_ifft.default, c(4, 6), None, 0, "ortho"),
    case("d0 d2 +", aten.fft_rfft.default, r(6, 8, 2), None, 1),
    case("d0 +", aten.fft_irfft.default, c(6, 5), 8),
    case("d0 +", aten.fft_hfft.default, c(6, 5)),
    case("d0 +", aten.fft_fft2.default, c(6, 4, 2)),
    case("d0 +", aten.fft_rfft2.default, r(6, 4, 8)),
    case("d1 +", aten.fft_irfft2.default, c(4, 6, 3), None, [0, 2]),
    case("+", aten.fft_fftn.default, c(6, 4)),
    case("d0 +", aten.fft_ifftn.default, c(6, 4, 2), [4, 2]),
    case("d1 +", aten._fft_c2c.default, c(4, 6), [0], 0, True),
    case("d0 +", aten._fft_r2c.default, r(6, 4), [1], 0, True),
    case("d0 +", aten._fft_c2r.default, c(6, 5), [1], 2, 8),
    case("d0 +", aten.fft_fftshift.default, r(6, 4), [1]),
]

# Operands that an op has no gradient for.
NO_GRADIENT = {
    "aten::_native_batch_norm_legit_functional": ("running_mean", "running_var"),
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::cross_entropy_loss": ("weight",),
}

CASES = [
    *POINTWISE,
    *REDUCE,
    *MATMUL,
    *ATTENTION,
    *NORM,
    *INDEXING,
    *ARRANGE,
    *VIEWS,
    *CONV,
    *LOSS,
    *OTHER,
    *RECURRENT,
    *BAGS,
    *FOURIER,
]


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
