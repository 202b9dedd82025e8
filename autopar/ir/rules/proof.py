"""Proof of a rule by example: the op on shards, put together again, equals the whole op.

For one choice of a factor and one set of operand values, forward and backward:

    operand   Shard: a piece      Replicate: the whole      Partial: random summands
    result    Shard: concatenate  Replicate: each is equal  Partial: add up
    gradient  as the rule says of each operand, by the same table
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, fx

from autopar.ir.graph import is_tensor
from autopar.ir.placement import Placement, Shard, dual
from autopar.ir.rule import Choice, FactorRule
from autopar.ir.rules.sizes import local_arguments
from autopar.ir.torch_private import pytree

# (operand values, shape of the first result; None: the whole one) -> results
Run = Callable[[Sequence[Tensor], Sequence[int] | None], list[Tensor]]


def runner(node: fx.Node) -> Run:
    """Executes an op on other operands than its own, with the sizes in its arguments rewritten."""

    def run(values: Sequence[Tensor], shape: Sequence[int] | None) -> list[Tensor]:
        left = iter(values)
        args, kwargs = pytree.tree_map(
            lambda leaf: next(left) if isinstance(leaf, fx.Node) and is_tensor(leaf) else leaf,
            (node.args, node.kwargs) if shape is None else local_arguments(node, shape),
        )
        outcome = node.target(*args, **kwargs)  # type: ignore[operator]  # call_function targets are callable
        return [leaf for leaf in pytree.tree_leaves(outcome) if isinstance(leaf, Tensor)]

    return run


def check(
    run: Run,
    values: Sequence[Tensor],
    rule: FactorRule,
    choice: Choice,
    *,
    num_parts: int = 2,
    seed: int = 0,
    scale: float = 1.0,
    tolerance: float = 1e-9,
    run_local: Run | None = None,
    constants: Collection[int] = (),
) -> str | None:
    """The error of ``choice`` of ``rule`` on ``num_parts`` ranks, None if it is right.

    values: whole operands. scale: of the gradients of the results. run_local: what a rank runs, if it is a lowering
        and not the op itself.
    constants: operands that the op has no gradient for.
    """
    generator = torch.Generator().manual_seed(seed)
    whole_values = [_leaf(v, p not in constants) for p, v in enumerate(values)]
    whole = run(whole_values, None)
    cotangents = [
        scale * torch.randn(r.shape, generator=generator, dtype=r.dtype) if _floats(r) else None for r in whole
    ]
    whole_grads = gradients(whole, cotangents, whole_values)

    operands = [rule.operand(position, choice) for position in range(len(values))]
    results = [rule.result(position, choice) for position in range(len(whole))]
    pieces = [_split(v.detach(), operands[p][0], num_parts, generator) for p, v in enumerate(whole_values)]
    expected = [_split(r.detach(), results[p], num_parts, generator)[0].shape for p, r in enumerate(whole)]
    got: list[list[Tensor]] = []
    got_grads: list[list[Tensor | None]] = []
    for rank in range(num_parts):
        local_values = [_leaf(piece[rank], p not in constants) for p, piece in enumerate(pieces)]
        local = (run_local or run)(local_values, expected[0] if expected else ())
        for number, (r, goal) in enumerate(zip(local, expected, strict=True)):
            if r.shape != goal:
                return f"{choice}: local result {number} has shape {tuple(r.shape)}, expected {tuple(goal)}"
        local_cotangents = [
            None if c is None else _split(c, dual(results[p]), num_parts, generator)[rank]
            for p, c in enumerate(cotangents)
        ]
        got.append([r.detach() for r in local])
        got_grads.append(gradients(local, local_cotangents, local_values))

    for number, r in enumerate(whole):
        if not _joins_to(r.detach(), [parts[number] for parts in got], results[number], tolerance):
            return f"{choice}: result {number} is not {results[number]}"
    for position, grad in enumerate(whole_grads):
        parts = [grads[position] for grads in got_grads]
        if grad is None and all(part is None for part in parts):
            continue
        zero = torch.zeros_like(values[position]) if grad is None else grad
        filled = [torch.zeros_like(pieces[position][rank]) if part is None else part for rank, part in enumerate(parts)]
        if not _joins_to(zero, filled, operands[position][1], tolerance):
            return f"{choice}: gradient of operand {position} is not {operands[position][1]}"
    return None


def _floats(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _leaf(value: Tensor, differentiable: bool) -> Tensor:
    return value.detach().clone().requires_grad_(differentiable and _floats(value))


def gradients(
    results: Sequence[Tensor], cotangents: Sequence[Tensor | None], values: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of ``values``, None where there is none."""
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    wanted = [v for v in values if v.requires_grad]
    if not pairs or not wanted:
        return [None] * len(values)
    found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True))
    return [next(found) if v.requires_grad else None for v in values]


def _split(value: Tensor, placement: Placement, num_parts: int, generator: torch.Generator) -> list[Tensor]:
    if isinstance(placement, Shard):
        return [part.contiguous() for part in value.tensor_split(num_parts, placement.dim)]
    if placement.is_replicate():
        return [value] * num_parts
    parts = []
    rest = value
    for _ in range(num_parts - 1):
        if _floats(value):
            part = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        else:
            part = torch.randint(0, 3, value.shape, generator=generator).to(value.dtype)
        parts.append(part)
        rest = rest - part
    return [*parts, rest]


def _joins_to(whole: Tensor, parts: Sequence[Tensor], placement: Placement, tolerance: float) -> bool:
    if isinstance(placement, Shard):
        return _close(torch.cat(list(parts), placement.dim), whole, tolerance)
    if placement.is_replicate():
        return all(_close(part, whole, tolerance) for part in parts)
    return _close(torch.stack(list(parts)).sum(0).to(whole.dtype), whole, tolerance)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not _floats(b):
        return bool(torch.equal(a, b))
    # A sum of large numbers is as exact as they are.
    largest = max(1.0, float(b.detach().abs().nan_to_num(posinf=0.0).max())) if b.numel() else 1.0
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True))
