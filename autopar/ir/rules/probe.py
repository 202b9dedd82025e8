"""Factors of an op that no rule describes, found by trying.

The op is run on small random operands, whole and in halves. If halves of one dimension of some operands give
halves of one dimension of every result (or summands of it), forward and backward, that dimension is a factor.
What cannot be tried (too large, random, no kernel on the CPU) is repeated on every rank.

    unknown_op   (8, 6), (6, 4) -> (8, 4)      probed:  f0 f1, f1 f2 -> f0 f2    f1 summed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.ir.placement import Placement, Shard
from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, numel, replicated_rule
from autopar.ir.rules.proof import Run, check, runner

# Elements of all operands and results together beyond which the op is tried on smaller sizes.
_MAX_ELEMENTS = 1 << 16
_SMALL = 8
_MAX_COMBINATIONS = 256
_TOLERANCE = 1e-4
# What an op says to arguments that it does not take.
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError)

# For each operand the dimension that is cut, if any.
_Cut = tuple[int | None, ...]


class _Trial(NamedTuple):
    values: list[Tensor]
    results: list[Tensor]


def probe(call: Call) -> FactorRule | None:
    """The rule found by trying, None if nothing could be found out."""
    if not _may_run(call):
        return None
    small = _shrink(call)
    run = runner(_node_of(small))
    trials = [trial for signed in (False, True) if (trial := _try(run, small, signed=signed)) is not None]
    if not trials:
        return None

    operands: list[list[DimFactors]] = [[()] * len(o.shape) for o in call.operands]
    results: list[list[DimFactors]] = [[()] * len(t.shape) for t in call.results]
    factors = Factors()
    summed: set[str] = set()
    for cut in _cuts(small):
        if any(d is not None and operands[p][d] for p, d in enumerate(cut)):
            continue
        placements = _placements(run, small, trials[0], cut)
        if placements is None or any(isinstance(p, Shard) and results[n][p.dim] for n, p in enumerate(placements)):
            continue
        if not all(_holds(run, small, trial, cut, placements) for trial in trials):
            continue
        size = next(call.operands[p].shape[d] for p, d in enumerate(cut) if d is not None)
        name = f"f{len(factors.sizes)}"
        for p, d in enumerate(cut):
            if d is not None:
                operands[p][d] = factors.dim(name, size)
        for n, placement in enumerate(placements):
            if isinstance(placement, Shard):
                results[n][placement.dim] = factors.dim(name, call.results[n].shape[placement.dim])
            else:
                summed.add(name)
    if not factors.sizes:
        return None
    return factors.rule(
        [_filled(factors, dims, o.shape) for dims, o in zip(operands, call.operands, strict=True)],
        [_filled(factors, dims, t.shape) for dims, t in zip(results, call.results, strict=True)],
        summed=summed,
        flops=replicated_rule(call).flops,
    )


def _may_run(call: Call) -> bool:
    """An ATen or custom op without side effects, with tensors on both sides and nothing left open."""
    target = call.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not call.opaque
        and bool(call.operands)
        and bool(call.results)
        and all(size > 0 for shape in call.shapes for size in shape)
    )


def _shrink(call: Call) -> Call:
    """The same call with every large size replaced by a small one, equal ones by equal ones, in arguments too."""
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


def _node_of(call: Call) -> fx.Node:
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


def _try(run: Run, call: Call, *, signed: bool) -> _Trial | None:
    """Operands that the op takes, with what it makes of them; None if it refuses or is not a function."""
    generator = torch.Generator().manual_seed(int(signed))
    values = [_random(operand, generator, signed) for operand in call.operands]
    try:
        first, second = run(values, None), run(values, None)
    except _REFUSALS:
        return None
    if [tuple(t.shape) for t in first] != [t.shape for t in call.results]:
        return None
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return None  # random, or not a number
    return _Trial(values, first)


def _random(operand: Operand, generator: torch.Generator, signed: bool) -> Tensor:
    """Numbers, all positive unless ``signed``; indices that are valid in any dimension of size 2."""
    if operand.dtype.is_floating_point or operand.dtype.is_complex:
        positive = torch.rand(operand.shape, generator=generator) + 0.1
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


def _placements(run: Run, call: Call, trial: _Trial, cut: _Cut) -> list[Placement | None] | None:
    """Placement of each result (None: a summand), by the shapes that the first half gives."""
    halves = [v if d is None else v.narrow(d, 0, v.shape[d] // 2).contiguous() for v, d in zip(trial.values, cut)]
    try:
        results = run(halves, None)
    except _REFUSALS:
        return None
    placements: list[Placement | None] = []
    for local, full in zip(results, trial.results, strict=True):
        if local.dim() != full.dim():
            return None
        smaller = [d for d, (a, b) in enumerate(zip(local.shape, full.shape)) if a != b]
        if len(smaller) > 1 or any(2 * local.shape[d] != full.shape[d] for d in smaller):
            return None
        if not smaller and not full.dtype.is_floating_point:
            return None  # counts and indices that happen to add up
        placements.append(Shard(smaller[0]) if smaller else None)
    return placements


def _holds(run: Run, call: Call, trial: _Trial, cut: _Cut, placements: list[Placement | None]) -> bool:
    """Whether a rule with only this factor is right for 2, 4 and as many parts as there can be."""
    size = next(call.operands[p].shape[d] for p, d in enumerate(cut) if d is not None)
    rule = FactorRule(
        operands=tuple(_only(o.shape, d) for o, d in zip(call.operands, cut, strict=True)),
        results=tuple(
            _only(t.shape, p.dim if isinstance(p, Shard) else None)
            for t, p in zip(call.results, placements, strict=True)
        ),
        sizes={"f": size},
        summed=frozenset({"f"}) if None in placements else frozenset(),
    )
    try:
        return all(
            check(run, trial.values, rule, "f", num_parts=num_parts, tolerance=_TOLERANCE) is None
            for num_parts in {2, 4, size}
            if size % num_parts == 0
        )
    except _REFUSALS:
        return False


def _only(shape: tuple[int, ...], dim: int | None) -> TensorFactors:
    return tuple(("f",) if d == dim else () for d in range(len(shape)))


def _filled(factors: Factors, dims: list[DimFactors], shape: tuple[int, ...]) -> TensorFactors:
    """Dimensions of which nothing was found out are whole."""
    return tuple(found or factors.fresh(size) for found, size in zip(dims, shape, strict=True))
