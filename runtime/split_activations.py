"""What autograd saves of a block under a split backward (``split_backward``), and when it goes.

    I   every node of the line reads what was saved for it. What no branch reads as well goes with the node.
    W   the branches read the rest, and it goes with them.

Autograd alone would hold all of it until W. Of a block that is rematerialised nothing is saved in forward but what its
level says; it is recomputed once for both passes (``recomputation``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from autopar.runtime.torch_private import node_of_backward


class Saved:
    """One tensor that autograd saves. fill: gives it a value, if it has none yet. value: None before that, and once it
    has gone."""

    __slots__ = ("__weakref__", "fill", "value")

    def __init__(self, fill: Callable[[], None] | None, value: Tensor | None = None) -> None:
        self.fill, self.value = fill, value


@dataclass(slots=True)
class _InputPass:
    """The I that runs. on_line: whether a node is on its line. still_read: whether W, too, runs a node. read: what the
    node at hand has read."""

    on_line: Callable[[Node], bool]
    still_read: Callable[[Node], bool]
    node: Node | None = None
    read: list[Saved] = field(default_factory=list)

    def note(self, saved: Saved) -> None:
        node = node_of_backward()
        if node is not self.node:
            self.end_node()
            self.node = node
        if node is not None and not self.still_read(node):
            self.read.append(saved)

    def end_node(self) -> None:
        for saved in self.read:
            saved.value = None
        self.node, self.read = None, []


# The thread of autograd that belongs to a device reads it, so it is no context variable.
_running: list[_InputPass] = []


@contextmanager
def releasing(on_line: Callable[[Node], bool], still_read: Callable[[Node], bool]) -> Iterator[None]:
    """Within it, an I, what a node of autograd has read goes with the node, unless it is ``still_read``."""
    _running.append(_InputPass(on_line, still_read))
    try:
        yield
    finally:
        _running.pop().end_node()


def is_on_line(node: Node) -> bool | None:
    """Whether a node is on the line of the I that runs: W runs no node before it then. None if no I runs."""
    return _running[-1].on_line(node) if _running else None


def read(saved: Saved) -> Tensor:
    """What autograd saved, for a node of its."""
    if saved.fill is not None:
        saved.fill()
    assert saved.value is not None, "the backward of a block reads what it read before"
    if _running:
        _running[-1].note(saved)
    return saved.value


def held(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which keeps what autograd saves."""

    def run(*args: Any) -> Any:
        with saved_tensors_hooks(lambda value: Saved(None, value), read):
            return call(*args)

    return run
