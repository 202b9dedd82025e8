"""Normalisations and softmax.

layer_norm   d0 d1 h, h, h -> d0 d1 h           h is blocked
group_norm   b (g c) y, (g c), (g c) -> b (g c) y   c and y are blocked
batch_norm   b c y, c, c, c, c -> b c y         b and y are lowered, and couple: statistics are global
"""

from __future__ import annotations

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, dim_of, numbered, numel, operand_factors


def layer_norm(call: Call) -> FactorRule | None:
    """Layer and RMS norm over the last dimensions, with per-row statistics as further results."""
    bound = call.bound()
    x: Operand = bound["x"] if "x" in bound else bound["input"]
    shape = bound.get("normalized_shape")
    num_normed = 1 if shape is None else len(shape)
    rank = len(x.shape)
    factors = Factors()
    dims = tuple(
        factors.dim(f"h{d}" if num_normed > 1 else "h", size, block=True)
        if d >= rank - num_normed
        else factors.dim(f"d{d}", size)
        for d, size in enumerate(x.shape)
    )
    operands = [dims if o.position == x.position else dims[rank - num_normed :] for o in call.operands]
    results = []
    for result in call.results:
        if result.shape == x.shape:
            results.append(dims)
        elif result.shape[: rank - num_normed] == x.shape[: rank - num_normed]:
            results.append(dims[: rank - num_normed] + ((),) * (len(result.shape) - rank + num_normed))
        else:
            return None
    return factors.rule(operands, results, flops=8 * numel(x.shape))


def layer_norm_backward(call: Call) -> FactorRule | None:
    """Gradients of the input row by row, of weight and bias summed over the rows."""
    bound = call.bound()
    x: Operand = bound["input"]
    first = len(x.shape) - len(bound["normalized_shape"])
    factors = Factors()
    dims = tuple(factors.dim(f"d{d}", size, block=d >= first) for d, size in enumerate(x.shape))
    statistics = dims[:first] + ((),) * (len(x.shape) - first)

    def of(shape: tuple[int, ...]) -> TensorFactors:
        return dims if shape == x.shape else dims[first:] if shape == x.shape[first:] else statistics

    rows = {name for dim in dims[:first] for name in dim}
    return factors.rule(
        [of(o.shape) for o in call.operands],
        [of(r.shape) for r in call.results],
        summed=rows if any(r.shape != x.shape for r in call.results) else (),
        flops=12 * numel(x.shape),
    )


def group_norm(call: Call) -> FactorRule | None:
    """Group normalisation: batch and groups are factors, channels of a group and space are not divided."""
    bound = call.bound()
    x: Operand = bound["input"]
    groups = bound["num_groups" if "num_groups" in bound else "group"]
    batch, channels, *space = x.shape
    factors = Factors()
    g = factors.dim("g", groups) + factors.dim("c", channels // groups, block=True)
    b = factors.dim("b", batch)
    dims: TensorFactors = (b, g, *factors.whole(space))
    operands = [dims if o.position == x.position else (g,) for o in call.operands]
    stats: TensorFactors = (b, factors.dim("g", groups))
    results = [dims if r.shape == x.shape else stats for r in call.results]
    return factors.rule(operands, results, flops=8 * numel(x.shape))


def batch_norm(call: Call) -> FactorRule | None:
    """Statistics over batch and space in training, running statistics otherwise."""
    bound = call.bound()
    x: Operand = bound["input"]
    training = bound.get("training", "no_training" not in call.name)
    rank = len(x.shape)
    factors = Factors()
    c = factors.dim("c", x.shape[1])
    names = ["b", "c", *numbered(rank - 2, "y")]
    dims = factors.dims(names, x.shape)
    operands = [dims if o.position == x.position else (c,) for o in call.operands]
    per_channel = (x.shape[1],)
    results: list[TensorFactors] = []
    for number, result in enumerate(call.results):
        if number == 0:
            results.append(dims)
        elif result.shape == per_channel:
            results.append((c,))
        elif result.shape == (0,):
            results.append(((),))
        else:
            return None
    coupled = [name for name in names if name != "c"] if training else []
    return factors.rule(
        operands,
        results,
        lowered=dict.fromkeys(coupled, "batch_norm"),
        couples=coupled,
        flops=8 * numel(x.shape),
    )


def instance_norm(call: Call) -> FactorRule | None:
    """Each sample and channel for itself, unless running statistics are kept."""
    bound = call.bound()
    x: Operand = bound["input"]
    if bound["running_mean"] is not None or not bound["use_input_stats"]:
        return None
    factors = Factors()
    c = factors.dim("c", x.shape[1])
    dims: TensorFactors = (factors.dim("b", x.shape[0]), c, *factors.whole(x.shape[2:]))
    operands = [dims if o.position == x.position else (c,) for o in call.operands]
    return factors.rule(operands, [dims], flops=8 * numel(x.shape))


def weight_norm(call: Call) -> FactorRule | None:
    """A weight scaled to the norms ``g`` of its slices along ``dim``: slices are independent.

    weight_norm (dim 0)   o _1, o 1 -> o _1
    """
    bound = call.bound()
    weight: Operand = bound["v"]
    rank = len(weight.shape)
    apart = bound["dim"] % rank if bound["dim"] != -1 else None
    factors = Factors()
    dims = tuple(factors.dim("o", s) if d == apart else factors.fresh(s) for d, s in enumerate(weight.shape))
    norms = tuple(dims[d] if d == apart else () for d in range(rank))

    def describe(shape: tuple[int, ...]) -> TensorFactors:
        return dims if shape == weight.shape else norms[: len(shape)]

    if any(len(o.shape) not in (0, rank) for o in call.operands):
        return None
    return factors.rule(
        [describe(o.shape) for o in call.operands],
        [describe(r.shape) for r in call.results],
        flops=4 * numel(weight.shape),
    )


def along_dim(call: Call) -> FactorRule | None:
    """softmax, log_softmax, normalisations of each line along ``dim``."""
    bound = call.bound()
    x: Operand = bound["self"]
    dim = dim_of(bound["dim"], len(x.shape))
    factors = Factors()
    names = numbered(len(x.shape))
    dims: list[DimFactors] = [
        factors.dim(name, size, block=d == dim) for d, (name, size) in enumerate(zip(names, x.shape))
    ]
    return factors.rule(
        operand_factors(call, {x.position: tuple(dims)}, factors), [tuple(dims)], flops=5 * numel(x.shape)
    )


RULES: dict[str, Rule] = {
    "autopar::rms_norm": layer_norm,
    "aten::layer_norm": layer_norm,
    "aten::native_layer_norm": layer_norm,
    "aten::native_layer_norm_backward": layer_norm_backward,
    "aten::rms_norm": layer_norm,
    "aten::_fused_rms_norm": layer_norm,
    "aten::group_norm": group_norm,
    "aten::native_group_norm": group_norm,
    "aten::batch_norm": batch_norm,
    "aten::native_batch_norm": batch_norm,
    "aten::_native_batch_norm_legit": batch_norm,
    "aten::_native_batch_norm_legit_functional": batch_norm,
    "aten::_native_batch_norm_legit_no_training": batch_norm,
    "aten::_batch_norm_no_update": batch_norm,
    "aten::instance_norm": instance_norm,
    "aten::_weight_norm": weight_norm,
    "aten::_weight_norm_interface": weight_norm,
    "aten::softmax": along_dim,
    "aten::_softmax": along_dim,
    "aten::_safe_softmax": along_dim,
    "aten::log_softmax": along_dim,
    "aten::_log_softmax": along_dim,
}
