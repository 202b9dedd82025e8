"""What pairs of passes that run at once may hide of each other (``autopar.ir.pairs``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.pairs import run_at_once
from autopar.ir.schedule import Action, Pipelining
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.pricing.pricing import Pricing
from autopar.search.stages.stage import Stage

# Share of what could hide that does, on a CPU, whose cores also move what is sent. Measured between two hosts with
# experts on both, in two runs each: 0.11 and 0.53 at 1 Gbit/s, 0.47 and 0.52 at 100 Mbit/s (benchmarks/two_queues.py).
_HIDES = 0.4


def hidden_by_pairs(
    pricing: Pricing,
    inside: Sequence[Sequence[BlockPrice]],
    stages: Sequence[Stage],
    shape: Pipelining,
    forward: Sequence[float],
    backward: Sequence[float],
) -> Callable[[Action, Action], float] | None:
    """Seconds that a forward and a backward which run at once hide of each other; None where they run one after the
    other. inside: the blocks of each stage. forward, backward: seconds of each stage.

    At best both compute in turns and communicate in turns, and neither is faster than alone.
    """
    device = pricing.ops.cluster.device
    able = device.is_cpu and device.stack.two_queues == "cpu"
    on_host = any(
        block.host[stage.level(number)].added.total_s
        for own, stage in zip(inside, stages, strict=True)
        for number, block in enumerate(own, stage.first)
    )
    each = [[block.communication for block in own] for own in inside]
    communicating = [(sum(one.forward_s for one in own), sum(one.backward_s for one in own)) for own in each]
    if not run_at_once(
        shape,
        able=able,
        zero=max((pricing.zero, *(pricing.zero_stages or ()))),
        on_host=on_host,
        communicates=any(map(any, communicating)),
        nodes=pricing.workload.captured.graph.nodes,
    ):
        return None

    def hidden_s(ahead: Action, back: Action) -> float:
        alone = forward[ahead.stage], backward[back.stage]
        waiting = communicating[ahead.stage][0] + communicating[back.stage][1]
        return _HIDES * (sum(alone) - max(sum(alone) - waiting, waiting, *alone))

    return hidden_s
