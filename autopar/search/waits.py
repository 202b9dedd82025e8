"""How long ranks wait for each other where they meet: at collectives, and for what neighbours in a pipeline send.

Ranks with equal work are not equally fast at every moment, and whoever meets waits for the slowest. Noise adds up at
random, so t seconds of work with n meetings in between cost

    n * jitter(t / n)  =  jitter * sqrt(t * n / 1 ms)        jitter: after a millisecond (``Device.jitter_s``)

A collective by itself cannot know what it comes after. So prices count each as after a millisecond, which bounds them
from below and makes fewer collectives better; how many there are is seen in what is left without that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.rule import Assignment
from autopar.ir.schedule import Pipelining
from autopar.search.evaluate import Priced, evaluate_stages, exposed_step_sync, exposed_sync
from autopar.search.pricing import Pricing
from autopar.search.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """calm, pricing: blocks and prices without waits. forward_s, backward_s: waited in a pass of each stage. sync_s: by
    each rank of the pipeline at collectives of a step."""

    calm: Priced
    pricing: Pricing
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sync_s: tuple[float, ...]

    @classmethod
    def of(
        cls,
        pricing: Pricing,
        leaders: tuple[Assignment, ...],
        priced: Priced,
        stages: Sequence[Stage],
        shape: Pipelining,
    ) -> Waits:
        """priced: ``evaluate`` of ``leaders`` with ``pricing``."""
        device = pricing.ops.cluster.device
        if not device.jitter_s:
            none = (0.0,) * len(stages)
            return cls(calm=priced, pricing=pricing, forward_s=none, backward_s=none, sync_s=none[: shape.num_ranks])
        own = replace(pricing, moves=pricing.moves.calm)
        calm = evaluate_stages(own, leaders, stages)

        def waiting(work_s: float, seconds: float, calm_s: float, others: int = 0) -> float:
            return device.waiting_s(work_s, (seconds - calm_s) / device.jitter_s + others)

        forward, backward = [], []
        for number, stage in enumerate(stages):
            blocks = calm.blocks[stage.first : stage.last + 1]
            around = {shape.rank_of(n) for n in (number - 1, number + 1) if 0 <= n < len(stages)}
            received = int(not around <= {shape.rank_of(number)})
            with_waits, without = (pass_seconds(each, stage, own.prefetch) for each in (priced, calm))
            work = calm.prelude_s + sum(b.compute.forward_s for b in blocks)
            forward.append(waiting(work, with_waits[0], without[0], received))
            levels = (stage.level(b) for b in range(stage.first, stage.last + 1))
            work = sum(b.compute.backward_s + b.recomputed_s[level] for b, level in zip(blocks, levels, strict=True))
            backward.append(waiting(work, with_waits[1], without[1], received))
        sync = []
        for rank in range(shape.num_ranks):
            held = [b for n in shape.stages_of(rank) for b in range(stages[n].first, stages[n].last + 1)]
            with_waits_s, without_s = (exposed_step_sync([each.blocks[b] for b in held]) for each in (priced, calm))
            work = sum(calm.blocks[b].compute.backward_s for b in held)
            sync.append(waiting(work, with_waits_s, without_s))
        return cls(
            calm=calm, pricing=own, forward_s=tuple(forward), backward_s=tuple(backward), sync_s=tuple(sync)
        )  # fmt: skip

    def of_passes(self) -> list[float]:
        """Of each stage, forward and backward of a microbatch together."""
        return list(map(sum, zip(self.forward_s, self.backward_s, strict=True)))


def pass_seconds(priced: Priced, stage: Stage, prefetch: int) -> tuple[float, float, float]:
    """Seconds of a microbatch in a stage, forward and backward, and what of both is spent on ZeRO's parameters."""
    inside = range(stage.first, stage.last + 1)
    blocks = [priced.blocks[b] for b in inside]
    forward, backward = exposed_sync(blocks, prefetch)
    ahead = priced.prelude_s + sum(b.forward_s for b in blocks) + forward
    whole = sum(b.backward_s(stage.level(n)) for b, n in zip(blocks, inside, strict=True)) + backward
    return ahead, whole, forward + backward
