"""Building blocks shared by the rules: naming factors, aligning broadcast dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.rules.call import Call, Operand

# A rule is a function of the call; None where it does not cover the arguments.
Rule = Callable[[Call], FactorRule | None]


def aten(names: str) -> list[str]:
    """Qualified names of the ATen ops in a list of words."""
    return [f"aten::{name}" for name in names.split()]


def table(rule: Rule, names: str) -> dict[str, Rule]:
    """One rule for several ATen ops."""
    return dict.fromkeys(aten(names), rule)


@dataclass(slots=True)
class Factors:
    """The factors of one rule while it is written. Dimensions of size 1 have no factor."""

    sizes: dict[str, int] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)

    def dim(self, name: str, size: int, *, block: bool = False) -> DimFactors:
        """A dimension that runs over factor ``name``."""
        if size <= 1:
            return ()
        known = self.sizes.setdefault(name, size)
        assert known == size, f"factor {name} has sizes {known} and {size}"
        if block:
            self.blocked.add(name)
        return (name,)

    def dims(self, names: Iterable[str], shape: Sequence[int]) -> TensorFactors:
        """Dimensions that run over the factors ``names``, one factor each."""
        return tuple(self.dim(name, size) for name, size in zip(names, shape, strict=True))

    def fresh(self, size: int) -> DimFactors:
        """A dimension that nothing else runs over and that is never sharded."""
        return self.dim(f"_{len(self.sizes)}", size, block=True)

    def whole(self, shape: Sequence[int]) -> TensorFactors:
        """A tensor of which no dimension is sharded."""
        return tuple(self.fresh(size) for size in shape)

    def rule(
        self,
        operands: Iterable[TensorFactors],
        results: Iterable[TensorFactors],
        *,
        summed: Iterable[str] = (),
        lowered: dict[str, str] | None = None,
        linear: Iterable[Iterable[int]] = (),
        flops: float = 0.0,
        couples: Iterable[str] = (),
        joint: Iterable[str] = (),
    ) -> FactorRule:
        """The rule; factors of size 1, which no dimension has, are dropped from the options."""
        return FactorRule(
            operands=tuple(operands),
            results=tuple(results),
            sizes=self.sizes,
            summed=frozenset(f for f in summed if f in self.sizes),
            lowered={f: name for f, name in (lowered or {}).items() if f == "*" or self._all_known(f)},
            blocked=frozenset(self.blocked),
            linear=tuple(frozenset(positions) for positions in linear),
            flops=flops,
            couples=frozenset(f for f in couples if f in self.sizes),
            joint=tuple(choice for choice in joint if self._all_known(choice)),
        )

    def _all_known(self, choice: str) -> bool:
        return all(factor in self.sizes for factor in factors_of_choice(choice))


def numbered(count: int, prefix: str = "d") -> list[str]:
    """``d0, d1, ...``: names of dimensions that have no meaning of their own."""
    return [f"{prefix}{number}" for number in range(count)]


def aligned(result: TensorFactors, result_shape: Sequence[int], shape: Sequence[int]) -> TensorFactors | None:
    """Factors of an operand that broadcasts to a result; None if it does not."""
    if len(shape) > len(result_shape):
        return None
    offset = len(result_shape) - len(shape)
    dims: list[DimFactors] = []
    for number, size in enumerate(shape):
        full = result_shape[offset + number]
        if size == full:
            dims.append(result[offset + number])
        elif size == 1:
            dims.append(())
        else:
            return None
    return tuple(dims)


def replicated_rule(call: Call) -> FactorRule:
    """The rule of an op that nothing is known of: every rank repeats it. Always valid."""
    factors = Factors()
    return factors.rule(
        [factors.whole(operand.shape) for operand in call.operands],
        [factors.whole(result.shape) for result in call.results],
        flops=estimated_flops(call),
    )


def estimated_flops(call: Call) -> float:
    """Operations of an op that nothing is known of: one an element, and the products of its input with its matrices.

    A matrix is an operand after the first with floating point numbers whose rows or columns are as long as the rows of
    that one: every row is multiplied by it. One that has as many rows is no matrix, but another input.
    """
    elements = sum(map(numel, call.shapes))
    floating = [operand.shape for operand in call.operands if operand.dtype.is_floating_point]
    if not floating or len(floating[0]) < 2:
        return elements
    rows, width = numel(floating[0][:-1]), floating[0][-1]
    matrices = [
        shape for shape in floating[1:] if len(shape) == 2 and width > 1 and width in shape and shape[0] != rows
    ]
    return elements + 2.0 * rows * sum(map(numel, matrices))


def dim_of(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def dims_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dimensions counted from the front; None and () mean all."""
    if dims is None or dims == ():
        return tuple(range(rank))
    if isinstance(dims, int):
        return (dim_of(dims, rank),)
    return tuple(dim_of(d, rank) for d in dims)


def numel(shape: Sequence[int]) -> float:
    """Elements of a tensor of this shape, as a float."""
    return float(prod(shape))


def sums(call: Call, *sets: Iterable[int]) -> list[list[int]]:
    """The ``linear`` sets whose values can be kept as partial sums: no booleans, no cast to integers."""
    operands = call.operands
    result_kinds = [_kind(r.dtype) for r in call.results]
    kept = []
    for positions in map(list, sets):
        kinds = [_kind(operands[p].dtype) for p in positions]
        if "bool" in kinds or "bool" in result_kinds or ("float" in kinds and "int" in result_kinds):
            continue
        kept.append(positions)
    return kept


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def operand_factors(call: Call, known: dict[int, TensorFactors], factors: Factors) -> list[TensorFactors]:
    """Factors of all operands in order: the known ones, the others whole."""
    return [
        known[operand.position] if operand.position in known else factors.whole(operand.shape)
        for operand in call.operands
    ]


def is_operand(value: object) -> bool:
    """Whether an argument of a call is a tensor operand."""
    return isinstance(value, Operand)
