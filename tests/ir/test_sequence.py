"""Pieces of a sequence against brute force over positions."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.sequence import RingShape, Sight, Span, blocks, hops, hops_needed, imbalance, joined, owner, spans

SIGHTS = [Sight("full"), Sight("causal"), Sight("sliding", 3), Sight("sliding", 7), Sight("mask")]


def _sees(sight: Sight, query: int, key: int) -> bool:
    if sight.kind in ("full", "mask"):
        return True
    return key <= query and (sight.kind == "causal" or key > query - (sight.window or 0))


def _positions(held: tuple[Span, ...]) -> list[int]:
    return [position for span in held for position in range(*span)]


def test_zigzag_order() -> None:
    assert [_positions(spans(8, 4, index, 4)) for index in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert spans(8, 1, 1, 2) == (Span(4, 8),)


@given(length=st.integers(0, 40), zigzag_ranks=st.integers(1, 5), count=st.integers(1, 5))
def test_every_position_is_held_once(length: int, zigzag_ranks: int, count: int) -> None:
    held = [_positions(spans(length, zigzag_ranks, index, count)) for index in range(count)]
    assert sorted(position for piece in held for position in piece) == list(range(length))
    assert max(map(len, held)) - min(map(len, held)) <= 1


spans_of = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: Span(min(pair), max(pair)))


@given(queries=spans_of, keys=spans_of, sight=st.sampled_from(SIGHTS))
def test_sight(queries: Span, keys: Span, sight: Sight) -> None:
    seen = [_sees(sight, *pair) for pair in product(range(*queries), range(*keys))]
    assert sight.num_pairs(queries, keys) == sum(seen)
    assert sight.sees_none(queries, keys) == (not any(seen))
    if seen:
        assert sight.sees_all(queries, keys) == all(seen)


@given(
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    zigzag_ranks=st.integers(1, 3),
    count=st.integers(1, 3),
    sight=st.sampled_from(SIGHTS),
    in_order=st.booleans(),
)
def test_blocks_cover_what_is_seen(
    lengths: tuple[int, int], zigzag_ranks: int, count: int, sight: Sight, in_order: bool
) -> None:
    for one, other in product(range(count), repeat=2):
        queries, keys = spans(lengths[0], zigzag_ranks, one, count), spans(lengths[1], zigzag_ranks, other, count)
        keys = joined(keys) if in_order else keys
        rows, columns = _positions(queries), _positions(keys)
        covered = set()
        for block in blocks(sight, queries, keys):
            assert [rows[r] for r in range(*block.rows)] == list(range(*block.queries))
            pairs = set(product(range(*block.rows), range(*block.columns)))
            assert not pairs & covered
            covered |= pairs
            if block.whole:
                assert all(_sees(sight, rows[r], columns[c]) for r, c in pairs)
            else:
                assert [columns[c] for c in range(*block.columns)] == list(range(*block.keys))
        assert all((r, c) in covered for r, s in enumerate(rows) for c, t in enumerate(columns) if _sees(sight, s, t))


@pytest.mark.parametrize("count", [2, 4, 64])
def test_keys_that_are_whole_are_four_blocks_in_natural_order(count: int) -> None:
    shape = RingShape(Sight("causal"), (4 * count, 4 * count), count, (count,), (False,))
    assert shape.reorders and shape.keys(()) == (Span(0, 4 * count),)
    for place in range(count):
        found = blocks(shape.sight, shape.queries((place,)), shape.keys(()))
        assert len(found) == {0: 3, count - 1: 2}.get(place, 4)
        assert all(block.whole or block.queries == block.keys for block in found), "of a shape that kernels take"


@pytest.mark.parametrize(("sizes", "ring"), [((4,), (False,)), ((2, 2), (False, True)), ((2, 2), (True, False))])
def test_order_of_keys(sizes: tuple[int, ...], ring: tuple[bool, ...]) -> None:
    shape = RingShape(Sight("causal"), (16, 16), 4, sizes, ring)
    everything = _positions(spans(16, 4))
    for holder in product(*map(range, shape.ring_sizes)):
        held = everything[slice(*shape.stored_keys(holder))]
        assert (
            [held[at] for at in _positions(shape.order_of_keys(holder))]
            == sorted(held)
            == _positions(shape.keys(holder))
        )
    in_order = [everything[at] for at in _positions(shape.order_of_all_keys)]
    pieces = [_positions(shape.keys(holder)) for holder in product(*map(range, shape.ring_sizes))]
    assert in_order == [position for piece in pieces for position in piece]


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 3), (3, 2), (2, 2, 2)])
def test_everyone_meets_every_piece_once(sizes: tuple[int, ...]) -> None:
    taken = hops(sizes)
    assert len(taken) == prod(sizes) - 1
    for place in product(*map(range, sizes)):
        met = [owner(place, sizes, taken[:step]) for step in range(len(taken) + 1)]
        assert sorted(met) == list(product(*map(range, sizes))) and met[0] == place


def test_a_window_needs_few_hops() -> None:
    def needed(sight: Sight, zigzag_ranks: int = 1) -> int:
        return len(hops_needed(RingShape(sight, (64, 64), zigzag_ranks, (8,), (True,))))

    assert needed(Sight("causal")) == needed(Sight("full")) == 7
    assert (needed(Sight("sliding", 1)), needed(Sight("sliding", 8)), needed(Sight("sliding", 10))) == (0, 1, 2)


@pytest.mark.parametrize("count", [2, 4, 8, 64])
def test_a_zigzag_sequence_is_balanced(count: int) -> None:
    length = 64 * count
    assert imbalance(Sight("causal"), (length, length), 1, count) == pytest.approx((2 * count - 1) / count, rel=0.02)
    assert imbalance(Sight("causal"), (length, length), count, count) == 1.0
    assert imbalance(Sight("full"), (length, length), 1, count) == 1.0
