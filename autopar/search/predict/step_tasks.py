"""A step of a plan as tasks on streams: what the closed form of the search takes for overlapped, in detail.

One rank of each place in the pipeline, block by block:

    compute   F0 blocks ........................  B0 blocks, the last first ....................  optimiser
    gather      next blocks' parameters (ZeRO)      again, where they were given back
    reduce                                              gradients of a block, once it is through
    send                  activations                            gradients of what was received

A gather is issued ``prefetch`` blocks before the block that waits for it. Communication inside blocks, over tensor,
sequence and expert axes, is waited for where it stands, so it counts as part of the compute stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.schedule.stream_simulator import COMPUTE, Span, Streams
from autopar.ir.schedule import Action, Pipelining
from autopar.search.pricing.block_prices import BlockPrice
from autopar.search.stages.stage import Stage

GATHER, REDUCE, SEND = "gather", "reduce", "send"
STREAMS = (COMPUTE, GATHER, REDUCE, SEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step is made of.

    sends: seconds from each stage to the next. prelude_s: of every microbatch of every stage. names: of the blocks.
    launch_s: of the optimiser's kernel.
    passing_s: of each stage's compute, spent on what it sends and receives in a pass.
    shared_s: ranks of the pipeline whose stages share parameters -> seconds to sum their gradients.
    """

    blocks: Sequence[BlockPrice]
    names: Sequence[str]
    stages: Sequence[Stage]
    shape: Pipelining
    sends: Sequence[float]
    prefetch: int
    prelude_s: float
    launch_s: float
    passing_s: Sequence[float]
    shared_s: Mapping[tuple[int, ...], float]

    def blocks_of(self, stage: int) -> range:
        return range(self.stages[stage].first, self.stages[stage].last + 1)


def run_step(costs: StepCosts) -> list[Span]:
    """Every task of a step with the time it ran, in the order of their ends."""
    built = _Step(costs)
    for rank, order in enumerate(costs.shape.orders()):
        built.rank(rank, order)
    return built.streams.run()


def pass_ends(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    """(rank, pass) -> when its last block was through."""
    return {(span.rank, span.name.split(" ")[0]): span.end_s for span in spans if span.stream == COMPUTE}


@dataclass(slots=True)
class _Step:
    costs: StepCosts
    streams: Streams = field(default_factory=Streams)
    # (stage, microbatch, backward): the task that brings a stage its input, or the gradient of its output.
    arrivals: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    # Rank -> the task after which all its own sums of gradients are done.
    summed: dict[int, int] = field(default_factory=dict)

    def arrival(self, stage: int, microbatch: int, backward: bool) -> int:
        key = stage, microbatch, backward
        if key not in self.arrivals:
            self.arrivals[key] = self.streams.reserve()
        return self.arrivals[key]

    def rank(self, rank: int, order: Sequence[Action]) -> None:
        """All that one rank does. The tasks of its compute stream, block by block, are ``passed``."""
        passed: list[int] = []
        reductions: list[int] = []
        left = dict.fromkeys(self.costs.shape.stages_of(rank), self.costs.shape.num_microbatches)
        fresh = set(left)
        for action in order:
            stage, kind, _ = action
            first = kind == "F" and stage in fresh
            fresh -= {stage} if kind == "F" else set()
            if kind in "BW":
                left[stage] -= 1
            self._action(rank, action, passed, reductions, first=first, last=kind in "BW" and not left[stage])
        mine = [b for stage in left for b in self.costs.blocks_of(stage)]
        seconds = sum(self.costs.blocks[b].optimiser_s for b in mine) + self.costs.launch_s
        sharing = {holders: seconds for holders, seconds in self.costs.shared_s.items() if rank in holders}
        if sharing:
            self.streams.add(rank, REDUCE, "own gradients", 0.0, (*passed[-1:], *reductions), self._summed(rank))
        for holders, shared in sharing.items():
            others = [self._summed(other) for other in holders]
            reductions.append(self.streams.add(rank, REDUCE, "shared gradients", shared, others))
        self.streams.add(rank, COMPUTE, "optimiser", seconds, reductions)

    def _summed(self, rank: int) -> int:
        if rank not in self.summed:
            self.summed[rank] = self.streams.reserve()
        return self.summed[rank]

    def _action(
        self, rank: int, action: Action, passed: list[int], reductions: list[int], *, first: bool, last: bool
    ) -> None:
        costs, shape = self.costs, self.costs.shape
        stage, kind, microbatch = action
        waits = self._waits_of(rank, action)
        inside = costs.blocks_of(stage)
        blocks = inside if kind == "F" else reversed(inside)
        alone = [(b, *self._of_block(b, action, first=first, last=last)) for b in blocks]
        if kind != "W":
            block, work, gather, reduce = alone[0]
            alone[0] = block, work + costs.passing_s[stage], gather, reduce
        if not any(gather or reduce for _, _, gather, reduce in alone):
            # Nothing runs beside it, so it is one task.
            total = sum(work for _, work, _, _ in alone)
            passed.append(self.streams.add(rank, COMPUTE, str(action), total, waits))
        else:
            for b, work, gather, reduce in alone:
                name = f"{action} {costs.names[b]}"
                if gather:
                    ready = passed[-costs.prefetch - 1 : -costs.prefetch] if len(passed) > costs.prefetch else []
                    waits = [*waits, self.streams.add(rank, GATHER, name, gather, ready)]
                passed.append(self.streams.add(rank, COMPUTE, name, work, waits))
                waits = []
                if reduce:
                    reductions.append(self.streams.add(rank, REDUCE, name, reduce, passed[-1:]))
        backward = kind != "F"
        other = stage - 1 if backward else stage + 1
        if kind != "W" and 0 <= other < shape.num_stages and shape.rank_of(other) != rank:
            seconds = costs.sends[min(stage, other)]
            number = self.arrival(other, microbatch, backward)
            self.streams.add(rank, SEND, f"{action} to stage {other}", seconds, passed[-1:], number)

    def _waits_of(self, rank: int, action: Action) -> list[int]:
        """What has to have come from another stage."""
        shape = self.costs.shape
        stage, kind, microbatch = action
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < shape.num_stages or shape.rank_of(source) == rank:
            return []
        return [self.arrival(stage, microbatch, kind != "F")]

    def _of_block(self, number: int, action: Action, *, first: bool, last: bool) -> tuple[float, float, float]:
        """Seconds of compute, of what it waits for, and of what follows it, of one block in one action."""
        block, (stage, kind, _) = self.costs.blocks[number], action
        sync, waited = block.sync, block.waited
        if kind == "F":
            start = self.costs.prelude_s if number == self.costs.stages[stage].first else 0.0
            start += waited.forward_s + (waited.first_s if first else 0.0)
            return block.forward_s + start, sync.forward_s + (sync.first_s if first else 0.0), 0.0
        whole = block.backward_s(self.costs.stages[stage].level(number))
        after, stays = (s.backward_s - s.regather_s + (s.step_s - s.first_s if last else 0.0) for s in (sync, waited))
        if kind == "B":
            return whole + waited.regather_s + stays, sync.regather_s, after
        # The first stage sends no gradient: its whole backward can wait.
        if kind == "I":
            return (whole - block.weights_s if stage else 0.0) + waited.regather_s, sync.regather_s, 0.0
        return (block.weights_s + block.twice_s if stage else whole) + stays, 0.0, after
