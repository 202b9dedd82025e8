"""What is communicated once a step, as far as the passes of a pipeline do not hide it.

gathers       parameters that ZeRO-1 and 2 shard, before the first forward of a stage. A stack that gathers ahead
              does so for a rank's next stage while it computes the stage before: all forwards there hide it
reductions    gradients, as the last backward of a stage makes them. What a rank computes afterwards, of its other
              stages, hides them too. They follow each other: the last of n stages ends no sooner than the
              reductions of any of them and all later ones do after that stage's last backward has begun
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model.communication.gradient_sync import most_hidden_s
from autopar.cost_model.schedule.pipeline_simulator import Event
from autopar.ir.schedule import Order, Pipelining
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.pricing.block_prices import exposed_gathers_of_step, reductions_of_step


def exposed_gathers(held: Sequence[Sequence[BlockPrice]], shape: Pipelining, *, ahead: bool) -> list[float]:
    """Seconds that the first forward of each stage waits. held: the blocks of each stage. ahead: whether the parameters
    of a rank's next stage are gathered during the stage before."""
    found = [0.0] * len(held)
    for rank, order in enumerate(shape.orders()):
        before = 1
        for stage in shape.stages_of(rank):
            found[stage] = exposed_gathers_of_step(held[stage], before)
            before = forwards_before_the_next(order, stage) if ahead else 1
    return found


def forwards_before_the_next(order: Order, stage: int) -> int:
    """Forwards of ``stage`` that a rank computes before the first forward of another of its stages after this one."""
    count = 0
    for action in order:
        if action.kind == "F" and action.stage == stage:
            count += 1
        elif action.kind == "F" and count:
            break
    return max(1, count)


def exposed_reductions(held: dict[int, Sequence[BlockPrice]], events: Sequence[Event]) -> float:
    """Seconds between the last pass of a rank and the end of its reductions. held: the blocks of each of its stages.
    events: its passes, in order."""
    last = {e.action.stage: e for e in events if e.action.kind in "BW"}
    total = exposed = lost = waited = 0.0
    end = events[-1].end_s if events else 0.0
    # From the stage whose last backward is the last of all.
    for stage in sorted(held, key=lambda stage: -last[stage].end_s if stage in last else 0.0):
        blocks = held[stage]
        after = end - last[stage].end_s if stage in last else 0.0
        computed = sum(b.compute.backward_s for b in blocks) + after
        reductions, own_lost, in_between = reductions_of_step(blocks)
        total, lost, waited = total + reductions, lost + own_lost, waited + in_between
        if total:
            exposed = max(exposed, total - most_hidden_s(computed, lost / total))
    return exposed + (lost * (total - exposed) / total if total else 0.0) + waited
