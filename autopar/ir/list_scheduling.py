"""Pipeline passes ordered by list scheduling: each rank, whenever it is free, runs the most urgent pass that it can.

ZB-2p of Qi et al., arXiv:2401.10241, section 3: ranks fill the pipeline with as many microbatches as memory is given
for, and weight gradients wait until nothing else can run. With 2 P microbatches or more and passes of equal length no
rank is idle from its first pass to its last:

    rank 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 ...        of 2 ranks and 4 microbatches alive on each
    rank 1      F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 ...

In the order of urgency: an input gradient, which the rank before waits for; a forward, which the rank after waits for;
weight gradients. All passes take one tick, and what is sent arrives at once. The first rank has no input gradient to
send: its backward is one pass of two ticks, as urgent as weight gradients.

The authors search settings of their heuristic with profiled times. The order here is a function of three numbers, so
that plans, the simulator and the runtime have the same one; docs/decisions/0025 compares it with other settings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

Pass = tuple[Literal["F", "I", "W"], int]
"""Forward, input-gradient or weight-gradient pass, of a microbatch."""


@lru_cache(maxsize=64)
def list_schedule(num_ranks: int, num_microbatches: int, most_alive: int) -> tuple[tuple[Pass, ...], ...]:
    """The passes of every rank, each of one stage, in order. O(passes).

    most_alive: microbatches between their forward and their weight gradients on a rank at once, 1 at least.
    """
    forwards, inputs, weights = ([0] * num_ranks for _ in range(3))
    busy = [0] * num_ranks
    orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
    tick = 0
    while min(weights) < num_microbatches:
        # What other ranks have sent by now: passes of this tick have not ended.
        sent, returned = [num_microbatches, *forwards], [*inputs[1:], num_microbatches]
        for rank, order in enumerate(orders):
            if busy[rank] > tick:
                continue
            comes_back = inputs[rank] < min(forwards[rank], returned[rank])
            begins = forwards[rank] < sent[rank] and forwards[rank] - weights[rank] < most_alive
            if comes_back and rank:
                order.append(("I", inputs[rank]))
                inputs[rank] += 1
            elif begins:
                order.append(("F", forwards[rank]))
                forwards[rank] += 1
            elif comes_back or weights[rank] < inputs[rank]:
                if not rank:
                    order.append(("I", inputs[rank]))
                    inputs[rank] += 1
                    busy[rank] = tick + 2
                order.append(("W", weights[rank]))
                weights[rank] += 1
        tick += 1
    return tuple(map(tuple, orders))
