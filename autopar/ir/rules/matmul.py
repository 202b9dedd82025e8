"""Products of matrices.

linear   d0 d1 k, n k, n -> d0 d1 n     k is summed; with a bias it is lowered too: one part adds it
columns_linear                          the same with k n for n k
scaled_linear                           either in 8-bit floats: every factor is lowered, as ranks share scales
matmul   b m k, b k n -> b m n          k is summed
addmm    m n, m k, k n -> m n           k is summed and lowered "bias"
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.ops.scalings import multiples_of
from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, aligned, numbered, numel, sums


def linear(call: Call) -> FactorRule | None:
    """A linear layer, with or without bias, whose matrix is stored by rows (n, k) or by columns (k, n)."""
    bound = call.bound()
    x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    by_columns = bound.get("by_columns", call.name == "autopar::columns_linear")
    width = (weight.shape[1] if by_columns else weight.shape[0]) if len(weight.shape) == 2 else 1
    factors = Factors()
    lead = factors.dims(numbered(len(x.shape) - 1), x.shape[:-1])
    k = factors.dim("k", x.shape[-1])
    out = (factors.dim("n", width),) if len(weight.shape) == 2 else ()
    operands: list[TensorFactors] = [(*lead, k), (k, *out) if by_columns else (*out, k)]
    if bias is not None:
        operands.append(out[: len(bias.shape)])
    if (history := bound.get("history")) is not None:
        operands.append(factors.whole(history.shape))
    return factors.rule(
        operands,
        [(*lead, *out)],
        summed="k",
        lowered={"k": "bias"} if bias is not None else None,
        linear=sums(call, [0], [1]) if bias is None else (),
        flops=2 * numel(x.shape) * width,
    )


def scaled_linear(call: Call) -> FactorRule | None:
    """A linear layer in 8-bit floats: rounded summands do not add up to a rounded sum, value or gradient.

    Parts on ranks are as wide as its recipe needs them. Rows count in the order of a matrix, of all leading dimensions.
    """
    rule = linear(call)
    assert rule is not None, "every linear layer has a rule"
    rows = [factor for dim in rule.operands[0][:-1] for factor in dim]
    return replace(
        rule,
        lowered=dict.fromkeys((name for name in rule.sizes if name not in rule.blocked), "scales"),
        linear=(),
        nonlinear=True,
        multiples=multiples_of(call.bound()["recipe"], tuple((name, rule.sizes[name]) for name in rows)),
    )


def matmul(call: Call) -> FactorRule | None:
    """Any ranks: leading dimensions broadcast, a vector has no rows."""
    x, y = call.operands
    return _product(call, x, y)


def _product(call: Call, x: Operand, y: Operand) -> FactorRule | None:
    """The last dimension of ``x`` against the last but one (or only) of ``y``."""
    factors = Factors()
    sides = _sides(factors, x.shape, y.shape, call.results[0].shape)
    if sides is None:
        return None
    left, right, result = sides
    return factors.rule(
        [left, right],
        [result],
        summed="k",
        linear=sums(call, [x.position], [y.position]),
        flops=2 * numel(call.results[0].shape) * x.shape[-1],
    )


def _sides(
    factors: Factors, x: tuple[int, ...], y: tuple[int, ...], out: tuple[int, ...]
) -> tuple[TensorFactors, TensorFactors, TensorFactors] | None:
    k = factors.dim("k", x[-1])
    m = (factors.dim("m", x[-2]),) if len(x) > 1 else ()
    n = (factors.dim("n", y[-1]),) if len(y) > 1 else ()
    shape = out[: len(out) - len(m) - len(n)]
    batch = factors.dims(numbered(len(shape), "b"), shape)
    left = aligned(batch, shape, x[:-2])
    right = aligned(batch, shape, y[:-2])
    if left is None or right is None:
        return None
    return (*left, *m, k), (*right, k, *n), (*batch, *m, *n)


def add_product(call: Call) -> FactorRule | None:
    """``beta * self + alpha * (first @ second)``; ``self`` broadcasts to the result."""
    bound = call.bound()
    added = bound["self"]
    first, second = (value for name, value in bound.items() if isinstance(value, Operand) and name != "self")
    factors = Factors()
    shape = call.results[0].shape
    sides = _sides(factors, first.shape, second.shape, shape)
    if sides is None:
        return None
    left, right, result = sides
    extra = aligned(result, shape, added.shape)
    if extra is None:
        return None
    return factors.rule(
        [extra, left, right],
        [result],
        summed="k",
        lowered={"k": "bias"},
        flops=2 * numel(shape) * first.shape[-1] + numel(shape),
    )


def outer(call: Call) -> FactorRule | None:
    """Outer product of two vectors: m, n -> m n."""
    x, y = call.operands
    factors = Factors()
    m, n = factors.dim("m", x.shape[0]), factors.dim("n", y.shape[0])
    return factors.rule([(m,), (n,)], [(m, n)], linear=sums(call, [0], [1]), flops=numel(call.results[0].shape))


def dot(call: Call) -> FactorRule | None:
    """Inner product of two vectors; their dimension is summed."""
    x, _ = call.operands
    factors = Factors()
    k = factors.dim("k", x.shape[0])
    return factors.rule([(k,), (k,)], [()], summed="k", linear=sums(call, [0], [1]), flops=2 * numel(x.shape))


def einsum(call: Call) -> FactorRule | None:
    """Each letter is a factor; one that the result lacks is summed."""
    bound = call.bound()
    equation = bound["equation"].replace(" ", "")
    operands = call.operands
    if "..." in equation or bound.get("path") is not None:
        return None
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted({c for c in left if c != ","})
        right = "".join(c for c in letters if left.count(c) == 1)
    size = {c: s for term, operand in zip(terms, operands) for c, s in zip(term, operand.shape) if s > 1}
    factors = Factors()
    described = []
    for term, operand in zip(terms, operands, strict=True):
        described.append(tuple(factors.dim(c, s) for c, s in zip(term, operand.shape, strict=True)))
    return factors.rule(
        described,
        [tuple(factors.dim(c, size.get(c, 1)) for c in right)],
        summed=[c for c in size if c not in right],
        linear=sums(call, *([o.position] for o in operands)),
        flops=2 * numel(list(size.values())),
    )


def grouped_mm(call: Call) -> FactorRule | None:
    """Rows sorted by expert, each through its expert's matrix: rows k, experts k n -> rows n."""
    x, weight, *others = call.operands
    if len(x.shape) != 2 or len(weight.shape) != 3:
        return None
    factors = Factors()
    rows = factors.dim("rows", x.shape[0], block=True)
    experts = factors.dim("experts", weight.shape[0], block=True)
    k, n = factors.dim("k", x.shape[1]), factors.dim("n", weight.shape[2])
    return factors.rule(
        [(rows, k), (experts, k, n), *(factors.whole(o.shape) for o in others)],
        [(rows, n)],
        summed="k",
        linear=sums(call, [0], [1]),
        flops=2 * numel(x.shape) * weight.shape[2],
    )


RULES: dict[str, Rule] = {
    "aten::linear": linear,
    "autopar::columns_linear": linear,
    "autopar::scaled_linear": scaled_linear,
    "aten::matmul": matmul,
    "aten::mm": matmul,
    "aten::bmm": matmul,
    "aten::mv": matmul,
    "aten::addmm": add_product,
    "aten::baddbmm": add_product,
    "aten::addmv": add_product,
    "aten::outer": outer,
    "aten::ger": outer,
    "aten::dot": dot,
    "aten::einsum": einsum,
    "aten::_grouped_mm": grouped_mm,
    "transformers::grouped_mm_fallback": grouped_mm,
}
