"""The matrix products inside an op: rows x depth with depth x columns, repeated.

    linear, matmul     one; what an op computes anew, as a convolution, is in its rows, and its kernel in its depth
    experts            two for each expert, in and out, of the rows that it gets when routing is even
    recurrent layer    for each layer one of all steps at once, and one whose steps come after each other

Each is seen as factors of the op, so that its shape on one rank follows from the degrees of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod

from torch import fx

from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules import recurrent
from autopar.ir.rules.call import call_of
from autopar.ir.rules.moe import EXPERTS

# Which of rows, columns, depth and repeats of a product are those of itself, and of the gradients of its operands.
ITSELF = (0, 1, 2, 3)
OF_WEIGHTS = (2, 1, 0, 3)
_GRADIENTS = ((0, 2, 1, 3), OF_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of the whole batch: factors of its rows, columns, depth and repeats.

    rows: what the sizes of their factors are multiplied by. depth: likewise (the kernel of a convolution).
    steps: products one after another that the rows are divided into, as are those of the gradient of the rows.
    """

    factors: tuple[frozenset[str], ...]
    flops: float
    rows: float = 1.0
    depth: float = 1.0
    steps: int = 1

    def local_shape(
        self,
        sizes: Mapping[str, int],
        degrees: Mapping[str, int],
        batch_factor: str | None,
        num_microbatches: int,
        sent: int,
    ) -> tuple[float, ...]:
        """Rows, columns, depth and repeats on one rank. sent: ranks that send rows to each other."""
        shape = []
        for factors in self.factors:
            size = 1.0
            for factor in factors:
                size *= sizes[factor] / degrees.get(factor, 1)
                if factor == batch_factor:
                    size /= num_microbatches
            shape.append(size)
        return shape[0] * self.rows * sent, shape[1], shape[2] * self.depth, shape[3]


def gradient_orders(contracted: Sequence[int], differentiable: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Orders of the products that give the gradients of the operands: of the first, and of the others (matrices)."""
    first, *others = contracted
    wanted = (first in differentiable, not set(others).isdisjoint(differentiable))
    return tuple(order for order, needed in zip(_GRADIENTS, wanted, strict=True) if needed)


def product_of(rule: FactorRule, contracted: Sequence[int], flops: float) -> tuple[Product, ...]:
    """The product of two operands; () for any other op. contracted: positions of those that share a lost factor."""
    if len(contracted) != 2:
        return ()
    left, right = (factors_of((rule.operands[position],)) for position in contracted)
    result = factors_of(rule.results)
    rows, columns = result - right, right & result - left
    if not left & rows or not columns:
        return ()
    factors = tuple(map(frozenset, (rows, columns, (left & right) - result, left & right & result)))
    window = flops / 2 / prod(rule.sizes[f] for group in factors for f in group)
    return (Product(factors, flops, depth=window),)


def products_of_experts(rule: FactorRule) -> tuple[Product, ...]:
    """The product of each expert on the way in and the one on the way out; () without experts."""
    if not rule.sizes.get(EXPERTS):
        return ()
    up, down = rule.operands[3:5]
    (experts, wide, hidden), inner = map(frozenset, up), frozenset(down[2])

    def size(factors: AbstractSet[str]) -> int:
        return prod(rule.sizes[f] for f in factors)

    tokens = frozenset(factors_of((rule.results[0][:-1],)))
    flops_of_row = 2 * size(hidden) * (size(wide) + size(inner))
    rows = rule.flops / flops_of_row / size(tokens) / size(experts)
    share = size(wide) / (size(wide) + size(inner))
    return (
        Product((tokens, wide, hidden, experts), share * rule.flops, rows=rows),
        Product((tokens, hidden, inner, experts), (1 - share) * rule.flops, rows=rows),
    )


def products_of_recurrence(node: fx.Node, rule: FactorRule) -> tuple[Product, ...]:
    """The product with each weight matrix of a recurrent layer."""
    call = call_of(node)
    steps = recurrent.num_steps(call)
    rows = frozenset({recurrent.BATCH, recurrent.STEPS} & set(rule.sizes))
    if not rows:  # a packed sequence, or one sample
        return ()
    products = []
    for position, stepwise in recurrent.matrices(call):
        columns, depth = map(frozenset, rule.operands[position])
        flops = 2.0 * prod(rule.sizes[factor] for factor in rows | columns | depth)
        products.append(Product((rows, columns, depth, frozenset()), flops, steps=steps if stepwise else 1))
    return tuple(products)


def launches_of_recurrence(node: fx.Node) -> tuple[int, int]:
    """Kernels of a recurrent layer, forward and backward.

    Of each step a product and its gates; of all steps at once the products with the input weights and the gradients of
    all weights.
    """
    call = call_of(node)
    stepwise = sum(matrix.stepwise for matrix in recurrent.matrices(call))
    others = len(recurrent.matrices(call)) - stepwise
    in_steps = 2 * stepwise * recurrent.num_steps(call)
    return in_steps + others, in_steps + 2 * others + stepwise


def factors_of(tensors: Sequence[TensorFactors]) -> set[str]:
    """All factors of some tensors."""
    return {f for tensor in tensors for dim in tensor for f in dim}
