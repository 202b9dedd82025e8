"""Factor rules: one per op, from which every placement follows.

A rule names the *factors* of an op, the independent loops it could be written as, and says which
dimension of which tensor runs over which factor:

    linear      b s k, n k -> b s n      k is summed

Putting a mesh axis on a factor decides the placement of each operand and result on that axis, the
placement of each gradient, and the local work. See ``FactorRule``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard
from autopar.ir.redistribution import grad_of_use

# The factors of one tensor dimension, major first. () is a dimension that no factor runs over (size 1,
# broadcast). ("b", "s") is a dimension that merges b and s, as view(b * s, h) makes.
DimFactors = tuple[str, ...]
TensorFactors = tuple[DimFactors, ...]

# Choice of an op along one mesh axis: a factor name, None (every rank repeats the op), several factors on the
# same axis ("s&t", see ``FactorRule.joint``), or "+k": the operands in ``rule.linear[k]`` are partial sums and so
# are the results.
Choice = str | None
# The choices of one op, one per mesh axis.
Assignment = tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRule:
    """How one op may be split.

    operands: factors of each tensor operand, in the order of ``graph.tensor_operands``.
    results: factors of each tensor result.
    sizes: global size of every factor.
    summed: factors that no result has, over which the op sums: sharding one makes the results Partial.
    lowered: factors that are sharded by a lowering of their own with collectives inside (vocabulary of a
        cross entropy, batch of a batch norm): factor -> name of the lowering. A result that lacks such a
        factor is Replicate unless the factor is in ``summed`` too.
    blocked: factors that are never sharded.
    joint: choices that put one axis on several factors at once, joined by "&", each with a lowering: queries and
        keys of an attention ("s&t": a ring), tokens and experts ("d0&experts": dispatch and combine). Their
        work is divided once. A factor may be in a joint choice though it is blocked by itself.
    nonlinear: the backward is not linear in the gradient: summands of a gradient are summed before it.
    leads: the op chooses for itself though it could follow its operand, so that a redistribution may come between.
    linear: each entry is a set of operand positions in which, together, the op is linear: if these are
        Partial and the others Replicate, the results are Partial.
    flops: floating point operations of one forward execution, all ranks together.
    multiples: factors whose local part has to be a multiple of that, at any sharding.
    couples: factors along which results depend on each other other than through a plain sum (batch of a
        batch norm): such a batch cannot be cut into microbatches.
    """

    operands: tuple[TensorFactors, ...]
    results: tuple[TensorFactors, ...]
    sizes: Mapping[str, int]
    summed: frozenset[str] = frozenset()
    lowered: Mapping[str, str] = field(default_factory=dict)
    blocked: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    flops: float = 0.0
    couples: frozenset[str] = frozenset()
    joint: tuple[str, ...] = ()
    leads: bool = False
    nonlinear: bool = False
    multiples: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {f for tensor in (*self.operands, *self.results) for dim in tensor for f in dim}
        missing = named - set(self.sizes)
        assert not missing, f"factors without a size: {sorted(missing)}"
        assert all(choice in self.lowered for choice in self.joint), f"joint choices without a lowering: {self.joint}"

    def shardable(self) -> tuple[str, ...]:
        """Factors that a mesh axis may be put on, in a fixed order.

        A factor must be the major one of every dimension it is in: a minor one would give each rank
        scattered pieces. It must be in a result, be summed, or have a lowering.
        """
        minor: set[str] = set()
        present: dict[str, None] = {}
        kept: set[str] = set(self.summed) | set(self.lowered)
        for tensor in (*self.operands, *self.results):
            seen: set[str] = set()
            for dim in tensor:
                big = [f for f in dim if self.sizes[f] > 1]
                minor.update(big[1:])
                for f in big:
                    present[f] = None
                    if f in seen:
                        minor.add(f)  # one factor on two dimensions of a tensor: a diagonal
                    seen.add(f)
        for tensor in self.results:
            kept.update(f for dim in tensor for f in dim)
        lost = {
            f
            for f in present
            if f not in self.summed
            and f not in self.lowered
            and any(all(f not in dim for dim in tensor) for tensor in self.results)
        }
        return tuple(f for f in present if f in kept and f not in minor | self.blocked | lost)

    def choices(self) -> tuple[Choice, ...]:
        """Every choice along one mesh axis, the replicated one first."""
        return (None, *self.shardable(), *self.joint, *(f"+{k}" for k in range(len(self.linear))))

    def allows(self, assignment: Assignment, mesh: Mesh, in_time: int | None = None) -> bool:
        """Whether every factor divides by the axes put on it, into parts that are the multiples asked for.

        in_time: number of an axis of microbatches, which one process has too: its parts need not be such multiples.
        """
        left: dict[str, int] = {}
        for number, (choice, axis) in enumerate(zip(assignment, mesh.axes, strict=True)):
            for factor in factors_of_choice(choice):
                size = left.get(factor, self.sizes[factor])
                multiple = 1 if number == in_time else self.multiples.get(factor, 1)
                if size % (axis.size * multiple):
                    return False
                left[factor] = size // axis.size
        return True

    def operand(self, position: int, choice: Choice) -> tuple[Placement, Placement]:
        """Placements on one axis of operand ``position``: of the value, and of the gradient it gets."""
        if choice is not None and choice.startswith("+"):
            value: Placement = Partial() if position in self.linear[int(choice[1:])] else Replicate()
            return value, grad_of_use(value, sharded_elsewhere=True)
        value = _placement_of(self.operands[position], choice)
        return value, grad_of_use(value, sharded_elsewhere=choice is not None)

    def result(self, position: int, choice: Choice) -> Placement:
        """Placement on one axis of result ``position``."""
        if choice is not None and choice.startswith("+"):
            return Partial()
        value = _placement_of(self.results[position], choice)
        if value.is_replicate() and choice in self.summed:
            return Partial()
        return value

    def operand_layout(
        self, position: int, assignment: Assignment, passing: Collection[int] = ()
    ) -> tuple[Layout, Layout]:
        """Layouts of operand ``position``: of the value and of its gradient.

        passing: axes on which the gradient is a summand as that of the results is; see ``analysis.derived_parameters``.
        """
        pairs = [self.operand(position, choice) for choice in assignment]
        grad = tuple(Partial() if axis in passing else pair[1] for axis, pair in enumerate(pairs))
        return tuple(p[0] for p in pairs), grad

    def result_layout(self, position: int, assignment: Assignment) -> Layout:
        """Layout of a result under an assignment, one placement for each mesh axis."""
        return tuple(self.result(position, choice) for choice in assignment)

    def is_positionwise(self, factor: str) -> bool:
        """Whether the op does the same at every position of ``factor``, and loses none: their order may change.

        Queries and keys of an attention that goes round a ring count, since the ring is told their order.
        """
        if any(name == "ring" and factor in factors_of_choice(choice) for choice, name in self.lowered.items()):
            return True
        if factor in self.blocked or self.lowered.get(factor) in ("attention", "moe"):
            return False
        tensors = (*self.operands, *self.results)
        if any(sum(factor in dim for dim in tensor) > 1 for tensor in tensors):
            return False
        kept = all(any(factor in dim for dim in tensor) for tensor in self.results)
        return kept or factor in self.summed or factor in self.lowered

    def parallel_degree(self, assignment: Assignment, mesh: Mesh) -> int:
        """Number of ranks among which the op's work is divided."""
        return prod(axis.size for c, axis in zip(assignment, mesh.axes, strict=True) if c and not c.startswith("+"))


def factors_of_choice(choice: Choice) -> tuple[str, ...]:
    """The factors that a choice puts the axis on: one, several if joint, none if replicated or a partial sum."""
    if choice is None or choice[0] == "+":
        return ()
    return tuple(choice.split("&")) if "&" in choice else (choice,)


@lru_cache(maxsize=1 << 14)
def _placement_of(tensor: TensorFactors, choice: Choice) -> Placement:
    factors = factors_of_choice(choice)
    for number, dim in enumerate(tensor):
        if any(factor in dim for factor in factors):
            return Shard(number)
    return Replicate()


def parse_rule(text: str, sizes: Mapping[str, int], **options: object) -> FactorRule:
    """A rule from its notation: ``parse_rule("b s k, n k -> b s n", sizes, summed=frozenset("k"))``.

    Dimensions are separated by spaces, ``(b s)`` is a merged dimension, ``1`` one without a factor.
    """
    left, right = text.split("->")
    return FactorRule(
        operands=tuple(_parse_tensor(t) for t in left.split(",")) if left.strip() else (),
        results=tuple(_parse_tensor(t) for t in right.split(",")),
        sizes=sizes,
        **options,  # type: ignore[arg-type]  # forwarded to the dataclass, which checks the names
    )


def _parse_tensor(text: str) -> TensorFactors:
    dims: list[DimFactors] = []
    merged: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            merged = []
        elif word == ")":
            assert merged is not None
            dims.append(tuple(merged))
            merged = None
        elif merged is not None:
            merged.append(word)
        else:
            dims.append(() if word == "1" else (word,))
    return tuple(dims)
