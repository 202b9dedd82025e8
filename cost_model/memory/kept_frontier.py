"""What a block keeps for its backward: the cheapest set of tensors for every price of memory, by minimum cuts.

``ForwardGraph`` says what can be kept and what can run again. With r of an op for "runs again", a for "something that
it makes is there in backward", and p the price of a byte in seconds, a set costs

    sum over ops    seconds * r  +  p * bytes * a * (1 - r)     a = 1 where backward needs it, or r = 1 of a reader

which is a cut of this network, the ones on the side of the source:

    source --inf--> a of what backward needs          r --inf--> a of all that the op reads
    a --p * bytes--> r                                r --seconds--> sink

What comes from outside the block is kept whatever the price.

As the price rises sets become smaller and slower: the corners of the lower convex hull of (bytes, seconds), which
``frontier`` finds from its two ends by cutting at the price at which two neighbours cost the same. Bytes and
picoseconds are integers, so every cut is exact.

Source of the construction: a closure problem with pairwise costs, Picard 1976, "Maximal closure of a graph".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import networkx as nx

from autopar.ir.analysis.forward_graph import ForwardGraph, Op, Tensor
from autopar.ir.kept_lists import INPUTS

PICOSECONDS = 10**12

# The sides of a cut.
_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedForward:
    """The forward of a block on one rank. num_bytes: of every tensor. picoseconds: of every op that may run again, what
    it communicates included. inputs: what the block reads of earlier blocks."""

    graph: ForwardGraph
    num_bytes: Mapping[Tensor, int]
    picoseconds: Mapping[Op, int]
    inputs: frozenset[Tensor] = frozenset()

    def keeping(self, kept: Container[Tensor]) -> KeptSet:
        """What it costs to keep no more than ``kept`` and what comes from outside the block."""
        again = self.graph.recomputed(kept)
        held = self.graph.held(again)
        return KeptSet(
            kept=held,
            recomputed=again,
            num_bytes=sum(self.num_bytes[tensor] for tensor in held),
            picoseconds=sum(self.picoseconds[name] for name in again),
        )

    def on_host(self, kept: KeptSet, listed: Container[str]) -> tuple[int, int]:
        """Bytes of ``kept`` that wait in host memory where a plan lists these names, and bytes of inputs among them. An
        op sends all that is kept of what it makes."""
        makers = self.graph.makers
        ops = {makers[tensor] for tensor in self.graph.named(listed) & kept.kept if tensor in makers}
        made = sum(self.num_bytes[tensor] for tensor in kept.kept if makers.get(tensor) in ops)
        inputs = sum(self.num_bytes[tensor] for tensor in self.inputs & kept.kept) if INPUTS in listed else 0
        return made + inputs, inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSet:
    """A point of the frontier. picoseconds: of ``recomputed``, the ops that run again."""

    kept: frozenset[Tensor]
    recomputed: frozenset[Op]
    num_bytes: int
    picoseconds: int

    @property
    def seconds(self) -> float:
        """Seconds of ``recomputed``."""
        return self.picoseconds / PICOSECONDS

    def cost(self, byte: int, picosecond: int) -> int:
        """What it costs, given the prices of a byte and of a picosecond."""
        return byte * self.num_bytes + picosecond * self.picoseconds


def frontier(forward: PricedForward) -> list[KeptSet]:
    """The corners of the lower convex hull of (bytes, seconds) of all sets that can be kept, most bytes first."""
    every = sum(forward.num_bytes.values()), sum(forward.picoseconds.values())
    # At either end the other matters only between equals.
    first, last = cheapest(forward, 1, every[0] + 1), cheapest(forward, every[1] + 1, 1)
    return [first, *_between(forward, first, last), *([last] if last.num_bytes < first.num_bytes else [])]


def _between(forward: PricedForward, more: KeptSet, less: KeptSet) -> list[KeptSet]:
    """The corners between two points of the hull."""
    if less.num_bytes >= more.num_bytes:
        return []
    price = Fraction(less.picoseconds - more.picoseconds, more.num_bytes - less.num_bytes)
    prices = price.numerator, price.denominator
    found = cheapest(forward, *prices)
    if found.cost(*prices) >= more.cost(*prices):
        return []
    return [*_between(forward, more, found), found, *_between(forward, found, less)]


def cheapest(forward: PricedForward, byte: int, picosecond: int, flow: Callable[..., object] | None = None) -> KeptSet:
    """The set that costs least, given the prices of a byte and of a picosecond. flow: an algorithm of networkx for
    maximum flow; its own choice if not given."""
    graph, makers = forward.graph, forward.graph.makers
    network: nx.DiGraph[Any] = nx.DiGraph()
    for tensor in graph.needed:
        if tensor in makers:
            network.add_edge(_SOURCE, ("there", makers[tensor]))  # without a capacity: infinite
    for name, op in graph.ops.items():
        made = {} if op.makes & graph.unkept else {"capacity": byte * sum(forward.num_bytes[t] for t in op.makes)}
        network.add_edge(("there", name), ("again", name), **made)
        if op.once:
            network.add_edge(("again", name), _SINK)
            continue
        network.add_edge(("again", name), _SINK, capacity=picosecond * forward.picoseconds[name])
        for tensor in op.reads:
            if tensor in makers:
                network.add_edge(("again", name), ("there", makers[tensor]))
    if _SOURCE not in network:
        return forward.keeping(())
    _, (ones, _) = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=flow)
    return forward.keeping(frozenset(tensor for tensor, name in makers.items() if ("again", name) not in ones))
