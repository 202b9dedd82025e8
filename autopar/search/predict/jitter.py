"""Straggler delays: how long ranks wait for each other at collectives, and for activations sent in a pipeline.

Ranks with equal work differ in speed from moment to moment, and ranks that meet wait for the slowest. Noise adds up at
random, so t seconds of work with n meetings in between cost

    n * jitter(t / n)  =  jitter * sqrt(t * n / 1 ms)        jitter: after a millisecond (``Device.jitter_s``)

A step ends when its slowest rank does, which counts as one more meeting. The price of a collective by itself cannot
depend on the work before it, so it counts a millisecond of work, which makes fewer collectives better and bounds them
from below (not for models so small that ranks meet more often). This module removes that share to obtain the noise-free
prices and the number of meetings, and adds the delays of whole passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost_model.compute.op_time import ZERO
from autopar.ir.rule import Assignment
from autopar.ir.schedule import Pipelining
from autopar.search.pricing.block_prices import Priced, evaluate_stages, exposed_step_sync, exposed_sync
from autopar.search.pricing.pricing import Pricing
from autopar.search.stages.stage import Stage

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerDelays:
    """Straggler delays in a step.

    noise_free, pricing: blocks and prices without delays. forward_s, backward_s: seconds of delay in a pass of each
    stage. sync_s: of each rank of the pipeline, at collectives once a step and at its end.
    """

    noise_free: Priced
    pricing: Pricing
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sync_s: tuple[float, ...]

    @classmethod
    def of(
        cls,
        pricing: Pricing,
        assignment: tuple[Assignment, ...],
        priced: Priced,
        stages: Sequence[Stage],
        shape: Pipelining,
    ) -> StragglerDelays:
        """Delays of a plan. priced: ``evaluate`` of ``assignment`` with ``pricing``."""
        device = pricing.ops.cluster.device
        if not device.jitter_s or pricing.mesh.size * shape.num_ranks == 1:
            none = (0.0,) * len(stages)
            return cls(
                noise_free=priced, pricing=pricing, forward_s=none, backward_s=none, sync_s=none[: shape.num_ranks]
            )
        own = replace(pricing, moves=pricing.moves.noise_free)
        noise_free = evaluate_stages(own, assignment, stages)
        # Of each stage, forward and backward: seconds of work, and how often ranks meet.
        passes = []
        for number, stage in enumerate(stages):
            blocks = noise_free.blocks[stage.first : stage.last + 1]
            levels = (stage.level(b) for b in range(stage.first, stage.last + 1))
            computed = sum((b.compute + b.recomputed[level] for b, level in zip(blocks, levels, strict=True)), ZERO)
            work = noise_free.prelude_s + computed.forward_s, computed.backward_s
            around = {shape.rank_of(n) for n in (number - 1, number + 1) if 0 <= n < len(stages)}
            received = int(not around <= {shape.rank_of(number)})
            noisy, quiet = (pass_seconds(each, stage, own.prefetch) for each in (priced, noise_free))
            passes.append(
                [(work[way], received + (noisy[way] - quiet[way]) / device.jitter_s) for way in (FORWARD, BACKWARD)]
            )
        sync = []
        for rank in range(shape.num_ranks):
            held = shape.stages_of(rank)
            blocks_of = [b for n in held for b in range(stages[n].first, stages[n].last + 1)]
            noisy_s, quiet_s = (
                sum(exposed_step_sync([each.blocks[b] for b in blocks_of])) for each in (priced, noise_free)
            )
            meetings = (noisy_s - quiet_s) / device.jitter_s
            waited = device.straggler_delay_s(sum(noise_free.blocks[b].compute.backward_s for b in blocks_of), meetings)
            # The step ends with its slowest rank, whatever it meets for before.
            work_s, often = (
                own.num_microbatches * sum(one[kind] for n in held for one in passes[n]) for kind in (0, 1)
            )
            sync.append(waited + device.straggler_delay_s(work_s / (often + meetings + 1), 1))
        return cls(
            noise_free=noise_free,
            pricing=own,
            forward_s=tuple(device.straggler_delay_s(*one[FORWARD]) for one in passes),
            backward_s=tuple(device.straggler_delay_s(*one[BACKWARD]) for one in passes),
            sync_s=tuple(sync),
        )

    def of_passes(self) -> list[float]:
        """Seconds of delay of each stage, forward and backward of a microbatch together."""
        return list(map(sum, zip(self.forward_s, self.backward_s, strict=True)))


def pass_seconds(priced: Priced, stage: Stage, prefetch: int) -> tuple[float, float, float]:
    """Seconds of a microbatch in a stage, forward and backward, and the exposed seconds of ZeRO's communication in
    both."""
    inside = range(stage.first, stage.last + 1)
    blocks = [priced.blocks[b] for b in inside]
    forward, backward = exposed_sync(blocks, prefetch)
    ahead = priced.prelude_s + sum(b.forward_s(stage.level(n)) for b, n in zip(blocks, inside, strict=True)) + forward
    whole = sum(b.backward_s(stage.level(n)) for b, n in zip(blocks, inside, strict=True)) + backward
    return ahead, whole, forward + backward
