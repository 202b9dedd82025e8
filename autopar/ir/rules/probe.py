"""Factors of an op that no rule describes, found by trying.

The op is run on small random operands, whole and in parts. If parts of one dimension of some operands give
parts of one dimension of every result (or summands of it), forward and backward, that dimension is a factor.
What cannot be tried (random, no kernel on the CPU) is repeated on every rank.

Kernels need not check what they are given: one that is handed half of one operand alone may read or write past its
end. So an op is first run without values, on the meta device, and only shapes that it accepts there are run with
values; and that is done in a process of its own, since what computes shapes may not check them either.

    unknown_op   (8, 6), (6, 4) -> (8, 4)      probed:  f0 f1, f1 f2 -> f0 f2    f1 summed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.ir.autograd.function_op import FunctionOp, is_own
from autopar.ir.graph import has_gradient_dtype
from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, numel, replicated_rule
from autopar.ir.rules.isolated import isolated
from autopar.ir.rules.proof import Run, check, runner
from autopar.ir.torch_private import OpOverload, schema_of

# Elements of all operands and results together beyond which the op is tried on smaller sizes.
_MAX_ELEMENTS = 1 << 16
_SMALL = 8
_MAX_COMBINATIONS = 256
_TOLERANCE = 1e-4
# Seconds after which a trial is given up. One takes less than a second on an idle machine.
LIMIT_S = 120.0
# What an op says to arguments that it does not take.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError)

# For each operand the dimension that is cut, if any.
_Cut = tuple[int | None, ...]
# For each result the dimension that is cut, None if the parts have to be added up.
_Joined = tuple[int | None, ...]


class Trial(NamedTuple):
    """Operands to try an op on, and the size of the gradients of its results."""

    values: list[Tensor]
    scale: float


class _Factor(NamedTuple):
    cut: _Cut
    joined: _Joined


def probe(call: Call) -> FactorRule | None:
    """The rule found by trying, None if nothing could be found out."""
    if not _may_run(call):
        return None
    small = shrunk(call)
    run = runner(node_of(small))
    if _shapes(run, small.operands) != [t.shape for t in small.results]:
        return None
    candidates = [_Factor(cut, joined) for cut in _cuts(small) if (joined := _joined(run, small, cut)) is not None]
    candidates = [factor for factor in candidates if _has_one_size(small, factor)]
    if not candidates:
        return None
    found = isolated(lambda: _tried(run, small, candidates), limit_s=LIMIT_S)
    if not found:
        return None

    operands: list[list[DimFactors]] = [[()] * len(o.shape) for o in call.operands]
    results: list[list[DimFactors]] = [[()] * len(t.shape) for t in call.results]
    factors = Factors()
    summed: set[str] = set()
    for cut, joined in found:
        size = next(call.operands[p].shape[d] for p, d in enumerate(cut) if d is not None)
        name = f"f{len(factors.sizes)}"
        for p, d in enumerate(cut):
            if d is not None:
                operands[p][d] = factors.dim(name, size)
        for n, d in enumerate(joined):
            if d is None:
                summed.add(name)
            else:
                results[n][d] = factors.dim(name, call.results[n].shape[d])
    return factors.rule(
        [_filled(factors, dims, o.shape) for dims, o in zip(operands, call.operands, strict=True)],
        [_filled(factors, dims, t.shape) for dims, t in zip(results, call.results, strict=True)],
        summed=summed,
        flops=replicated_rule(call).flops,
    )


def _has_one_size(call: Call, factor: _Factor) -> bool:
    """Whether a factor is as long in every tensor: patches of an image have channels × window for its channels."""
    sizes = {call.operands[p].shape[d] for p, d in enumerate(factor.cut) if d is not None}
    return len(sizes | {call.results[n].shape[d] for n, d in enumerate(factor.joined) if d is not None}) == 1


def _tried(run: Run, call: Call, candidates: Sequence[_Factor]) -> list[_Factor]:
    """Those candidates that are factors by what the op makes of values. No dimension has two factors."""
    trials = trials_of(run, call)
    found: list[_Factor] = []
    taken: set[tuple[bool, int, int]] = set()
    for factor in candidates:
        dims = {
            (is_result, n, d)
            for is_result, tensors in ((False, factor.cut), (True, factor.joined))
            for n, d in enumerate(tensors)
            if d is not None
        }
        if taken.isdisjoint(dims) and trials and all(_holds(run, call, trial, factor) for trial in trials):
            found.append(factor)
            taken |= dims
    return found


def trials_of(run: Run, call: Call) -> list[Trial]:
    """Operands that the op takes. A backward of its own is tried with large numbers too: it may limit them."""
    scales = ((1.0, 1.0), (30.0, 1e3)) if is_own(call.target) else ((1.0, 1.0),)
    found = []
    for size, scale in scales:
        for signed in (False, True):
            values = _try(run, call, signed=signed, size=size)
            if values is not None:
                found.append(Trial(values, scale))
    return found


def _is_pure(target: Any) -> bool:
    """Whether an op writes nothing and draws no random numbers."""
    if isinstance(target, FunctionOp):
        return not target.draws
    return (
        isinstance(target, OpOverload)
        and not schema_of(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _may_run(call: Call) -> bool:
    """An op without side effects, with tensors on both sides and nothing left open."""
    return (
        _is_pure(call.target)
        and not call.opaque
        and bool(call.operands)
        and bool(call.results)
        and all(size > 0 for shape in call.shapes for size in shape)
    )


def shrunk(call: Call) -> Call:
    """The call with every large size replaced by a small one, equal ones by equal ones, in arguments too."""
    if sum(map(numel, call.shapes)) <= _MAX_ELEMENTS:
        return call
    large = sorted({size for shape in call.shapes for size in shape if size > _SMALL})
    sizes = {size: _SMALL + 4 * (number + 1) for number, size in enumerate(large)}

    def visit(value: Any) -> Any:
        if isinstance(value, Operand):
            return replace(value, shape=tuple(sizes.get(s, s) for s in value.shape))
        if isinstance(value, tuple):
            return tuple(visit(item) for item in value)
        return sizes.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    return replace(
        call,
        args=visit(call.args),
        kwargs=tuple((name, visit(value)) for name, value in call.kwargs),
        results=tuple(replace(t, shape=tuple(sizes.get(s, s) for s in t.shape)) for t in call.results),
    )


def node_of(call: Call) -> fx.Node:
    """A node that makes the call."""
    graph = fx.Graph()
    nodes = []
    for operand in call.operands:
        node = graph.placeholder(f"x{operand.position}")
        node.meta["val"] = torch.empty(operand.shape, dtype=operand.dtype, device="meta")
        nodes.append(node)

    def lift(value: Any) -> Any:
        if isinstance(value, Operand):
            return nodes[value.position]
        return [lift(item) for item in value] if isinstance(value, tuple) else value

    node = graph.call_function(
        call.target, tuple(lift(a) for a in call.args), {name: lift(value) for name, value in call.kwargs}
    )
    node.meta["val"] = tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in call.results)
    return node


def _try(run: Run, call: Call, *, signed: bool, size: float) -> list[Tensor] | None:
    """Operands that the op takes; None if it refuses or is not a function."""
    generator = torch.Generator().manual_seed(int(signed))
    values = [_random(operand, generator, signed, size) for operand in call.operands]
    try:
        first, second = run(values, None), run(values, None)
    except REFUSALS:
        return None
    if [tuple(t.shape) for t in first] != [t.shape for t in call.results]:
        return None
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return None  # random, or not a number
    return values


def _random(operand: Operand, generator: torch.Generator, signed: bool, size: float) -> Tensor:
    """Numbers up to ``size``, all positive unless ``signed``; indices that are valid in any dimension of size 2."""
    if has_gradient_dtype(operand):
        positive = size * (torch.rand(operand.shape, generator=generator) + 0.1)
        sign = torch.randint(0, 2, operand.shape, generator=generator) * 2 - 1
        return (positive * sign if signed else positive).to(operand.dtype)
    return torch.randint(0, 2, operand.shape, generator=generator).to(operand.dtype)


def _cuts(call: Call) -> Iterator[_Cut]:
    """Sets of dimensions of equal size, at most one an operand; sets that cut more operands first."""
    shapes = [operand.shape for operand in call.operands]
    for size in sorted({s for shape in shapes for s in shape if s > 1 and s % 2 == 0}):
        options: list[list[int | None]] = [[*(d for d, s in enumerate(shape) if s == size), None] for shape in shapes]
        cuts = [cut for cut, _ in zip(product(*options), range(_MAX_COMBINATIONS), strict=False)]
        cuts.sort(key=lambda cut: sum(d is None for d in cut))
        yield from (cut for cut in cuts if any(d is not None for d in cut))


def _shapes(run: Run, operands: Sequence[Operand]) -> list[tuple[int, ...]] | None:
    """Shapes of the results, without computing anything; None if the op does not take such operands."""
    try:
        results = run([torch.empty(o.shape, dtype=o.dtype, device="meta") for o in operands], None)
    except REFUSALS:
        return None
    return [tuple(t.shape) for t in results]


def _parts(call: Call, cut: _Cut) -> list[int]:
    """Numbers of parts that a cut is tried in: 2, 4 and as many as there can be."""
    size = next(call.operands[p].shape[d] for p, d in enumerate(cut) if d is not None)
    return [num_parts for num_parts in sorted({2, 4, size}) if size % num_parts == 0]


def _joined(run: Run, call: Call, cut: _Cut) -> _Joined | None:
    """How the results are cut, by the shapes that parts of the operands give; None if there is no such way."""
    joined: _Joined | None = None
    for num_parts in _parts(call, cut):
        local = [
            operand if d is None else replace(operand, shape=_divided(operand.shape, d, num_parts))
            for operand, d in zip(call.operands, cut, strict=True)
        ]
        shapes = _shapes(run, local)
        if shapes is None or len(shapes) != len(call.results):
            return None
        if joined is None:
            dims = [[d for d, (a, b) in enumerate(zip(s, t.shape)) if a != b] for s, t in zip(shapes, call.results)]
            if any(len(d) > 1 for d in dims):
                return None
            joined = tuple(d[0] if d else None for d in dims)
        for shape, result, d in zip(shapes, call.results, joined, strict=True):
            if d is None and not has_gradient_dtype(result):
                return None  # counts and indices that happen to add up
            if shape != (result.shape if d is None else _divided(result.shape, d, num_parts)):
                return None
    return joined


def _divided(shape: tuple[int, ...], dim: int, num_parts: int) -> tuple[int, ...]:
    return tuple(s // num_parts if d == dim else s for d, s in enumerate(shape))


def _holds(run: Run, call: Call, trial: Trial, factor: _Factor) -> bool:
    """Whether a rule with only this factor is right."""
    size = next(call.operands[p].shape[d] for p, d in enumerate(factor.cut) if d is not None)
    rule = FactorRule(
        operands=tuple(_only(o.shape, d) for o, d in zip(call.operands, factor.cut, strict=True)),
        results=tuple(_only(t.shape, d) for t, d in zip(call.results, factor.joined, strict=True)),
        sizes={"f": size},
        summed=frozenset({"f"}) if None in factor.joined else frozenset(),
    )
    try:
        return all(
            check(run, trial.values, rule, "f", num_parts=num_parts, scale=trial.scale, tolerance=_TOLERANCE) is None
            for num_parts in _parts(call, factor.cut)
        )
    except REFUSALS:
        return False


def _only(shape: tuple[int, ...], dim: int | None) -> TensorFactors:
    return tuple(("f",) if d == dim else () for d in range(len(shape)))


def _filled(factors: Factors, dims: list[DimFactors], shape: tuple[int, ...]) -> TensorFactors:
    """Dimensions of which nothing was found out are whole."""
    return tuple(found or factors.fresh(size) for found, size in zip(dims, shape, strict=True))
