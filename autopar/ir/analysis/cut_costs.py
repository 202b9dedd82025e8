"""Costs of a cut of a stream: tensors and bytes that are made before it and needed after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.analysis.op_stream import Stream
from autopar.ir.graph import CapturedModel, has_gradient_dtype

# Cutting here would send a tensor that carries no gradient, or a tuple: worse than any number of tensors.
_UNSENDABLE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A value that exists from stream position ``made`` on and is last read at ``last``."""

    made: int
    last: int
    num_bytes: int
    weight: int


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """Cut costs of a stream. Cut ``c`` lies before position ``c``."""

    length: int
    lifetimes: tuple[Lifetime, ...]
    depths: tuple[int, ...]
    last_cut: int

    def profile(self, *, longest: int | None = None) -> list[tuple[int, int]]:
        """For every cut the number (unsendable ones count a million) and the bytes of the tensors that cross it.

        ``longest``: leave out values that live longer than this many positions, which pass by.
        """
        counts = [0] * (self.length + 2)
        sizes = [0] * (self.length + 2)
        for value in self.lifetimes:
            if longest is not None and value.last - value.made > longest:
                continue
            counts[value.made + 1] += value.weight
            counts[value.last + 1] -= value.weight
            sizes[value.made + 1] += value.num_bytes
            sizes[value.last + 1] -= value.num_bytes
        result: list[tuple[int, int]] = []
        count = size = 0
        for cut in range(self.length + 1):
            count += counts[cut]
            size += sizes[cut]
            result.append((count, size))
        return result

    def allowed(self, cut: int) -> bool:
        """Whether a block may begin here: not inside a multi-output op, not after the loss."""
        return cut <= self.last_cut


def liveness(captured: CapturedModel, stream: Stream) -> Liveness:
    """Lifetimes of all values of ``stream``. Reads by the graph's output do not count: any stage can return a value."""
    values = (*stream.nodes, *stream.sources)
    last = list(stream.position)
    for at, reads in enumerate(stream.reads):
        for value in reads:
            last[value] = at
    lifetimes = []
    for node, made, end in zip(values, stream.position, last, strict=True):
        if end > made:
            # A source exists just before its first user, so the cut in front of that user need not carry it.
            weight, num_bytes = _size(node)
            lifetimes.append(Lifetime(made=made, last=end, num_bytes=num_bytes, weight=weight))
    depths = [0] + [
        _common(before.meta.get("path", ""), after.meta.get("path", ""))
        for before, after in zip(stream.nodes, stream.nodes[1:], strict=False)
    ]
    loss = captured.loss_node()
    last_cut = stream.nodes.index(loss) if loss in stream.nodes else len(stream.nodes)
    return Liveness(len(stream.nodes), tuple(lifetimes), (*depths, 0), last_cut)


def num_bytes(node: fx.Node) -> int:
    """Bytes of a tensor node's global value."""
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())


def _size(node: fx.Node) -> tuple[int, int]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return _UNSENDABLE, 0
    if not has_gradient_dtype(value):
        return _UNSENDABLE, num_bytes(node)
    return 1, num_bytes(node)


def _common(first: str, second: str) -> int:
    """Number of leading module names that two paths share."""
    count = 0
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b or not a:
            break
        count += 1
    return count
