"""Pairs of passes of DualPipeV, the forward of one microbatch and the backward of another, that run at once.

    one after the other     F: compute, dispatch, compute, combine    B: compute, dispatch, compute, combine
    at once                 F: compute, dispatch, compute, combine
                            B: compute, dispatch, compute, combine    one computes while the other communicates

The two are of different stages of a rank, so that neither waits for the other (DeepSeek-AI, arXiv:2412.19437). Each has
a thread, and process groups of its own, so that the order of what is sent over a group is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from autopar.ir.lowered.random import is_random
from autopar.ir.schedule import Action, Pipelining

_SCHEDULE = "dualpipe-v"


def paired(order: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The passes of a rank's ``order``: a forward with the whole backward of another stage that follows it, and others
    alone."""
    waiting: Action | None = None
    for action in order:
        if waiting is not None:
            if action.kind == "B" and action.stage != waiting.stage:
                yield waiting, action
                waiting = None
                continue
            yield (waiting,)
        waiting = action if action.kind == "F" else None
        if waiting is None:
            yield (action,)
    if waiting is not None:
        yield (waiting,)


def run_at_once(
    shape: Pipelining, *, able: bool, zero: int, on_host: bool, communicates: bool, nodes: Iterable[fx.Node]
) -> bool:
    """Whether the pairs of ``shape`` run at once, and not one after the other.

    able: whether the device and the software can. zero: the highest ZeRO stage of any block; at 3 forward and backward
    gather parameters over the same groups. on_host: whether activations wait in host memory, which is sent and fetched
    in the order of passes. communicates: whether blocks communicate; else there is nothing to hide. nodes: of the
    model; none may draw random numbers, whose generator all threads share.
    """
    possible = shape.schedule == _SCHEDULE and able and zero < 3 and communicates and not on_host
    return possible and not any(map(is_random, nodes))
