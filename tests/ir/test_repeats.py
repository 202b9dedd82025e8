"""The repeat finder against its definition, tried on every stretch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.analysis.tandem_repeats import Repeat, Wiring, find_repeats


def wiring(
    tokens: Sequence[int],
    reads: Sequence[Sequence[int]],
    *,
    heavy: Sequence[bool] | None = None,
    cut_cost: Callable[[int, int], tuple[float, ...]] = lambda cut, period: (0.0,),
) -> Wiring:
    return Wiring(
        tokens=tokens, reads=reads, position=range(len(tokens)), heavy=heavy or [True] * len(tokens), cut_cost=cut_cost
    )


def is_repeat(w: Wiring, start: int, period: int, count: int) -> bool:
    """The definition: equal tokens; operands local, carried or shared; the second instance depends on the first."""
    for k in range(1, count):
        for i in range(period):
            at, first = start + k * period + i, start + i
            if w.tokens[at] != w.tokens[first]:
                return False
            for slot, value in enumerate(w.reads[at]):
                original = w.reads[first][slot]
                second = w.reads[start + period + i][slot]
                if original >= start:  # local
                    same = value - k * period == original
                elif second >= start:  # carried
                    same = second < start + period and value - (k - 1) * period == second
                else:  # shared
                    same = value == original
                if not same:
                    return False
    tainted: set[int] = set()
    for at in range(start + period, start + 2 * period):
        if any(start <= v < start + period or v in tainted for v in w.reads[at]):
            if w.heavy[at]:
                return True
            tainted.add(at)
    return False


def most_saved(w: Wiring) -> int:
    length = len(w.tokens)
    best = 0
    for period in range(1, length // 2 + 1):
        for start in range(length - 2 * period + 1):
            for count in range(2, (length - start) // period + 1):
                if not is_repeat(w, start, period, count):
                    break
                best = max(best, period * (count - 1))
    return best


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Blocks repeated a few times between a prologue and an epilogue. Op 2 reads two values, op 1 is heavy."""
    op = st.integers(0, 2)
    tokens = [-1, *draw(st.lists(op, max_size=3))]
    for _ in range(draw(st.integers(1, 2))):
        tokens += draw(st.lists(op, min_size=1, max_size=4)) * draw(st.integers(1, 4))
    tokens += draw(st.lists(op, max_size=3))
    reads: list[list[int]] = [[]]
    for at in range(1, len(tokens)):
        second = [max(0, at - draw(st.sampled_from([1, 2, 3, 4, 99])))] if tokens[at] == 2 else []
        reads.append([at - 1, *second])
    return wiring(tokens, reads, heavy=[token == 1 for token in tokens])


@given(wirings())
@settings(max_examples=200)
def test_finds_the_repeat_that_saves_most_and_only_true_ones(w: Wiring) -> None:
    found = find_repeats(w)
    for repeat in found:
        assert is_repeat(w, repeat.start, repeat.period, repeat.count)
    assert max((repeat.saved for repeat in found), default=0) == most_saved(w)
    assert all(a.end <= b.start for a, b in pairwise(found))


def test_a_longer_repeat_wins_over_what_repeats_inside_it() -> None:
    tokens = [9, *[1, 1, 2] * 3]
    reads = [[], *[[at - 1] for at in range(1, 10)]]
    assert find_repeats(wiring(tokens, reads)) == [Repeat(start=1, period=3, count=3)]


def test_alternating_blocks_are_one_kind() -> None:
    tokens = [9, *[1, 2, 3, 4, 4, 5] * 2]
    reads = [[], *[[at - 1] for at in range(1, len(tokens))]]
    assert Repeat(start=1, period=6, count=2) in find_repeats(wiring(tokens, reads))


def test_parallel_branches_do_not_repeat() -> None:
    """Three projections of one value, then their sum."""
    assert find_repeats(wiring([9, 1, 1, 1, 2], [[], [0], [0], [0], [1, 2, 3]])) == []


def test_the_narrowest_rotation_is_chosen() -> None:
    tokens = [9, *[1, 2] * 4]
    reads = [[], *[[at - 1] for at in range(1, 9)]]
    found = find_repeats(wiring(tokens, reads, cut_cost=lambda cut, period: (float(cut % 2),)))
    assert found == [Repeat(start=2, period=2, count=3)]
