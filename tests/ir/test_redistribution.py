"""Redistribution, carried out on all ranks of a small mesh at once and compared with placing the whole tensor anew.

What the ranks hold is one array with the mesh axes in front: ``held[i, j]`` is what rank ``(i, j)`` holds.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard, dual
from autopar.ir.redistribution import Collective, Step, redistribute

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
PLACEMENTS: tuple[Placement, ...] = (R, P, S0, S1)
# What an operand needs along one axis: of the value, and of the gradient it sends back.
NEEDS: tuple[tuple[Placement, Placement], ...] = ((R, R), (R, P), (P, R), (S0, S0), (S1, S1))

Array = np.ndarray


def place(whole: Array, layout: Layout, sizes: tuple[int, ...]) -> Array:
    """What the ranks hold of ``whole`` in ``layout``. Partial axes hold unequal summands."""
    rank = len(sizes)
    held = whole[(None,) * rank]
    for axis, (placement, size) in enumerate(zip(layout, sizes, strict=True)):
        if isinstance(placement, Shard):
            held = np.concatenate(np.split(held, size, axis=rank + placement.dim), axis=axis)
        elif placement.is_partial():
            parts = [held * (number + 2) for number in range(size - 1)]
            held = np.concatenate([*parts, held - sum(parts)], axis=axis)
        else:
            held = np.repeat(held, size, axis=axis)
    return held


def whole(held: Array, layout: Layout) -> Array:
    """The tensor that the ranks hold; replicas have to agree."""
    rank = len(layout)
    for axis, placement in reversed(list(enumerate(layout))):
        pieces = np.split(held, held.shape[axis], axis=axis)
        if isinstance(placement, Shard):
            held = np.concatenate(pieces, axis=rank + placement.dim)
        elif placement.is_partial():
            held = sum(pieces[1:], pieces[0])
        else:
            for piece in pieces[1:]:
                np.testing.assert_array_equal(piece, pieces[0])
            held = pieces[0]
    return held[(0,) * rank]


def collective(
    held: Array, kind: Collective, step: Step, rank: int, gather_dim: int | None, shard_dim: int | None
) -> Array:
    """Carry out one collective along the step's axis, for all groups of ranks."""
    axis = step.axis
    size = held.shape[axis]

    def summed(x: Array) -> Array:
        return np.repeat(x.sum(axis, keepdims=True), size, axis=axis)

    def split(x: Array) -> Array:
        assert shard_dim is not None
        pieces = np.split(x, size, axis=rank + shard_dim)
        return np.concatenate([np.take(piece, [number], axis=axis) for number, piece in enumerate(pieces)], axis=axis)

    def gathered(x: Array) -> Array:
        assert gather_dim is not None
        joined = np.concatenate(np.split(x, size, axis=axis), axis=rank + gather_dim)
        return np.repeat(joined, size, axis=axis)

    if kind is Collective.SPLIT:
        return split(held)
    if kind is Collective.DIVIDE:
        return held / size
    if kind is Collective.ALL_GATHER:
        return gathered(held)
    if kind is Collective.ALL_REDUCE:
        return summed(held)
    if kind is Collective.REDUCE_SCATTER:
        return split(summed(held))
    if kind is Collective.ALL_TO_ALL:
        return split(gathered(held))
    return held


def forward(held: Array, steps: tuple[Step, ...], rank: int) -> Array:
    for step in steps:
        held = collective(held, step.forward, step, rank, step.gather_dim, step.shard_dim)
    return held


def backward(held: Array, steps: tuple[Step, ...], rank: int) -> Array:
    for step in reversed(steps):
        held = collective(held, step.backward, step, rank, step.shard_dim, step.gather_dim)
    return held


TENSOR = np.arange(1.0, 8 * 8 + 1).reshape(8, 8)
GRAD = TENSOR[::-1] * 3 - 7


def check(source: Layout, value: Layout, grad: Layout, sizes: tuple[int, ...]) -> None:
    steps = redistribute(source, value, grad)
    rank = len(sizes)
    there = forward(place(TENSOR, source, sizes), steps, rank)
    direct = place(TENSOR, value, sizes)
    assert there.shape == direct.shape
    np.testing.assert_allclose(whole(there, value), TENSOR)
    if not any(p.is_partial() for p in value):
        np.testing.assert_allclose(there, direct)
    wanted = tuple(dual(p) for p in source)
    back = backward(place(GRAD, grad, sizes), steps, rank)
    np.testing.assert_allclose(back, place(GRAD, wanted, sizes))


def check_all(sizes: tuple[int, ...], *, every: int = 1) -> None:
    """Check every layout of source and consumer on a mesh, or of them all each one in ``every``."""
    axes = len(sizes)
    cases = itertools.product(itertools.product(PLACEMENTS, repeat=axes), itertools.product(NEEDS, repeat=axes))
    for source, needs in itertools.islice(cases, 0, None, every):
        value, grad = tuple(n[0] for n in needs), tuple(n[1] for n in needs)
        try:
            check(source, value, grad, sizes)
        except AssertionError as error:
            steps = "\n  ".join(map(str, redistribute(source, value, grad)))
            raise AssertionError(f"{source} -> {value} / {grad} by\n  {steps}\n{error}") from error


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 4)], ids=str)
def test_every_redistribution_is_exact_forward_and_backward(sizes: tuple[int, ...]) -> None:
    check_all(sizes)


def test_redistributions_on_three_axes_are_exact() -> None:
    check_all((2, 2, 2), every=11)


@pytest.mark.slow
def test_every_redistribution_on_three_axes_is_exact() -> None:
    check_all((2, 2, 2))


@pytest.mark.parametrize("layout", list(itertools.product(PLACEMENTS, repeat=2)), ids=str)
def test_nothing_to_do_takes_no_steps(layout: Layout) -> None:
    assert redistribute(layout, layout, tuple(dual(p) for p in layout)) == ()
