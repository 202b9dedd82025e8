"""What a block may keep for its backward: the frontier is that of all sets that could be kept."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.memory.kept_frontier import KeptSet, PricedForward, cheapest, frontier
from autopar.ir.analysis.forward_graph import ForwardGraph, ForwardOp


@st.composite
def blocks(draw: st.DrawFn) -> PricedForward:
    """Up to 12 tensors, some of them from outside, the others made by ops of one or two results in turn."""
    outside = frozenset(range(draw(st.integers(1, 3))))
    num_bytes = {number: draw(st.integers(0, 9)) for number in outside}
    ops: dict[str, ForwardOp] = {}
    unkept: set[int] = set()
    while len(num_bytes) < 11 and draw(st.integers(0, 9)):
        reads = draw(st.frozensets(st.sampled_from(sorted(num_bytes)), min_size=1, max_size=3))
        makes = frozenset(range(len(num_bytes), len(num_bytes) + draw(st.integers(1, 2))))
        num_bytes |= {tensor: draw(st.integers(0, 9)) for tensor in makes}
        kind = draw(st.sampled_from(["plain", "plain", "plain", "once", "unkept"]))
        unkept |= makes if kind == "unkept" else set()
        ops[f"op{len(ops)}"] = ForwardOp(reads=reads, makes=makes, once=kind == "once")
    needed = draw(st.frozensets(st.sampled_from(sorted(num_bytes))))
    graph = ForwardGraph(ops=ops, needed=needed, unkept=frozenset(unkept), outside=outside)
    seconds = {name: draw(st.integers(0, 9)) for name, op in ops.items() if not op.once}
    return PricedForward(graph=graph, num_bytes=num_bytes, picoseconds=seconds)


def costs(forward: PricedForward) -> set[tuple[int, int]]:
    """(bytes, seconds) of whatever may run again."""
    graph, found = forward.graph, set[tuple[int, int]]()
    able = [name for name, op in graph.ops.items() if not op.once]
    for count in range(len(able) + 1):
        for again in combinations(able, count):
            read = graph.needed.union(*(graph.ops[name].reads for name in again))
            kept = {name for name, op in graph.ops.items() if name not in again and op.makes & read}
            if any(graph.ops[name].makes & graph.unkept for name in kept):
                continue
            held = graph.outside.union(*(graph.ops[name].makes for name in kept))
            seconds = sum(forward.picoseconds[name] for name in again)
            found.add((sum(forward.num_bytes[tensor] for tensor in held), seconds))
    return found


def corners(points: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the lower hull between the fastest and the smallest, by Andrew's monotone chain; most bytes first."""
    first = min(points, key=lambda point: (point[1], point[0]))
    last = min(points)
    hull: list[tuple[int, int]] = []
    for point in sorted(points):
        if point[0] > first[0]:
            break
        while len(hull) > 1 and _turns_right(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    best = [point for point in hull if point[0] != last[0] or point == last]
    return [point for point in best if point[0] != first[0] or point == first][::-1]


def _turns_right(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


@settings(max_examples=400, deadline=None)
@given(blocks())
def test_it_is_the_hull_of_all_sets(forward: PricedForward) -> None:
    found = frontier(forward)
    assert [(point.num_bytes, point.picoseconds) for point in found] == corners(costs(forward))


@settings(max_examples=200, deadline=None)
@given(blocks(), st.integers(0, 20), st.integers(1, 20))
def test_a_cut_is_the_cheapest_set(forward: PricedForward, byte: int, picosecond: int) -> None:
    found = cheapest(forward, byte, picosecond)
    assert found.cost(byte, picosecond) == min(byte * one + picosecond * other for one, other in costs(forward))
    assert forward.graph.recomputed(found.kept) == found.recomputed


def test_a_chain_is_kept_at_both_ends_or_in_places() -> None:
    """Of four tensors in a row, which all are needed, each costs more to make again than the one before."""
    ops = {
        name: ForwardOp(reads=frozenset({before}), makes=frozenset({name}))
        for before, name in (("x", "a"), ("a", "b"), ("b", "c"))
    }
    graph = ForwardGraph(ops=ops, needed=frozenset("xabc"), outside=frozenset("x"))
    forward = PricedForward(graph=graph, num_bytes=dict.fromkeys("xabc", 8), picoseconds={"a": 1, "b": 2, "c": 4})
    assert [(sorted(map(str, one.recomputed)), one.num_bytes, one.picoseconds) for one in frontier(forward)] == [
        ([], 32, 0),
        (["a"], 24, 1),
        (["a", "b"], 16, 3),
        (["a", "b", "c"], 8, 7),
    ]


def test_what_may_not_run_again_is_kept() -> None:
    op = ForwardOp(reads=frozenset("x"), makes=frozenset("y"), once=True)
    graph = ForwardGraph(ops={"draw": op}, needed=frozenset("y"), outside=frozenset("x"))
    forward = PricedForward(graph=graph, num_bytes={"x": 1, "y": 100}, picoseconds={})
    both = KeptSet(kept=frozenset("xy"), recomputed=frozenset(), num_bytes=101, picoseconds=0)
    assert frontier(forward) == [both]
