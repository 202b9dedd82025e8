"""Ops that pick, place and view elements: indexing, tables, concatenation, sorting, views."""

from __future__ import annotations

import torch

from autopar.ir.ops import composite
from tests.ir.rules.proved.operands import case, ints, r

aten = torch.ops.aten

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

_LAST = {"include_last_offset": True, "padding_idx": 3}
BAGS = [
    case("v! h b l +", composite.embedding_bag, r(8, 6), ints(8, 4, 3), mode="sum"),
    case("v! h b l + +", composite.embedding_bag, r(8, 6), ints(8, 4, 3), r(4, 3), mode="sum", padding_idx=2),
    case("v! h b +", composite.embedding_bag, r(8, 6), ints(8, 4, 3), mode="mean", padding_idx=2),
    case("h b", composite.embedding_bag, r(8, 6), ints(8, 4, 3), mode="max"),
    case("v! h +", composite.embedding_bag, r(8, 6), ints(8, 12), None, torch.tensor([0, 2, 2, 7]), mode="mean"),
    case(
        "v! h + +", composite.embedding_bag, r(8, 6), ints(8, 12), r(12), torch.tensor([0, 5, 12]), mode="sum", **_LAST
    ),
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

ARRANGEMENT = [*INDEXING, *BAGS, *ARRANGE, *VIEWS]
