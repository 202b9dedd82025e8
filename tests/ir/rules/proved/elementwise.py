"""Ops on each element, over some dimensions, or of nothing: pointwise, reductions, norms, losses, creations."""

from __future__ import annotations

import torch

from autopar.ir.ops import composite
from tests.ir.rules.proved.operands import bools, case, ints, pos, r

aten = torch.ops.aten

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

NORM = [
    case("d0 d1", aten.layer_norm.default, r(2, 4, 6), [6], r(6), r(6)),
    case("d0", aten.layer_norm.default, r(2, 4, 6), [4, 6], r(4, 6)),
    case("d0 d1", aten.native_layer_norm.default, r(2, 4, 6), [6], r(6), r(6), 1e-5),
    case("d0 d1", composite.rms_norm, r(2, 4, 6), r(6), 1e-6),
    case("d0 d1", composite.rms_norm, r(2, 4, 6), None, 1e-6),
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

LOSS = [
    case("c!", composite.cross_entropy, r(2, 4, 6), ints(6, 2, 4)),
    case("d0 d1 c!", composite.cross_entropy, r(2, 4, 6), ints(6, 2, 4), reduction="sum"),
    case("d0 d1 c!", composite.cross_entropy, r(2, 4, 6), ints(6, 2, 4), reduction="none", label_smoothing=0.1),
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

CREATION = [
    case("d0 d1", aten.full.default, [4, 6], 2.0),
    case("d0 d1", aten.new_zeros.default, r(3), [4, 6]),
    case("d0 d1", aten.zeros_like.default, r(4, 6)),
    case("", aten.arange.default, 8),
    case("d0 d1", aten.dropout.default, r(4, 6), 0.0, True),
]

ELEMENTWISE = [*POINTWISE, *REDUCE, *NORM, *LOSS, *CREATION]
