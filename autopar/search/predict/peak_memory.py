"""The fullest moment of a rank in a step.

Memory is fullest in some backward, when one block runs: what is kept of the blocks before it is still there, gradients
of those after it are there already.

    stage, blocks a b c d        kept of one microbatch        gradients of parameters
    forward of d ends            a b c d                       none in the first microbatch, else all
    backward of d                a b c d  + d's own            that of d comes
    backward of c                a b c    + c's own            d, that of c comes
    ...
    after the last backward      nothing                       all, and what the optimiser needs

What a block's backward holds of its own comes from ``BlockBackward.peak``, and from what FSDP gathers and
scatters: the parameters of the block and of those to come, gradients on their way out. Gradients that are summed in
buckets live there from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_model.memory.model_state import FRAGMENTATION, MemoryParts
from autopar.ir.schedule import Action, Order
from autopar.search.pricing.block_prices import BlockPrice, Priced
from autopar.search.stages.stage import Stage


def fullest_moment(
    priced: Priced, stages: Sequence[Stage], order: Order, whole_copies: MemoryParts, *, prefetch: int
) -> MemoryParts:
    """Bytes of one rank at its fullest. stages: of the whole pipeline. order: of the rank's passes.

    whole_copies: what it adds to its states that parameters of two of its stages are held once, but whole.
    """
    rank = _Rank.of(priced, stages, order, whole_copies, prefetch)
    fullest, most = rank.states, 0.0
    for action, moment, others, waiting in rank.passes(order):
        if action.kind == "F":
            continue
        total = moment.total + others + (1 + FRAGMENTATION) * (moment.activations + waiting) - moment.activations
        if total > most:
            most, fullest = total, rank.held(moment, others, waiting)
    return max(fullest, rank.resting, key=lambda parts: parts.total)


def each_moment(
    priced: Priced, stages: Sequence[Stage], order: Order, whole_copies: MemoryParts, *, prefetch: int
) -> Iterator[tuple[Action, MemoryParts]]:
    """What one rank holds in each of its passes: at the end of a forward, at the fullest of a backward.

    The arguments are those of ``fullest_moment``, which is the fullest of these, or the optimiser's.
    """
    rank = _Rank.of(priced, stages, order, whole_copies, prefetch)
    for action, moment, others, waiting in rank.passes(order):
        yield action, rank.held(moment, others, waiting)


class _Moment(NamedTuple):
    """moment: what the pass holds itself. others: gradients of other stages. waiting: kept of other passes."""

    action: Action
    moment: MemoryParts
    others: float
    waiting: float


_NOTHING = MemoryParts()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """By stage of a rank: bytes of gradients that the first backward brings, kept of a microbatch and until its weight
    gradients are computed; moments: (stage, whether it is the first of the step) -> the backward's.

    states: there all the time. resting: while the optimiser runs, when all gradients are there and no activation is.
    """

    states: MemoryParts
    resting: MemoryParts
    arriving: dict[int, float]
    kept: dict[int, float]
    later: dict[int, float]
    moments: dict[tuple[int, bool], MemoryParts]

    @staticmethod
    def of(priced: Priced, stages: Sequence[Stage], order: Order, whole_copies: MemoryParts, prefetch: int) -> _Rank:
        own = sorted({action.stage for action in order})
        inside = {number: priced.blocks[stages[number].first : stages[number].last + 1] for number in own}
        every = [block for blocks in inside.values() for block in blocks]
        lasting = sum(block.lasting_bytes for block in every) + whole_copies.gradients
        return _Rank(
            states=replace(sum((block.states for block in every), whole_copies), gradients=lasting),
            resting=sum((b.resting for b in every), MemoryParts(transient=max(b.optimiser_bytes for b in every))),
            arriving={number: sum(map(_arriving, blocks)) for number, blocks in inside.items()},
            kept={number: kept_of(priced, stages, number) for number in own},
            later={number: sum(block.later_bytes for block in inside[number]) if number else 0.0 for number in own},
            moments={
                (number, first): _stage_moment(inside[number], stages[number], first=first, prefetch=prefetch)
                for number in own
                for first in (False, True)
            },
        )

    def passes(self, order: Order) -> Iterator[_Moment]:
        now, begun = 0.0, set[int]()
        for action in order:
            stage, kind, _ = action
            if kind == "F":
                now += self.kept[stage]
                yield _Moment(action, _NOTHING, sum(self.arriving[other] for other in begun), now)
                continue
            moment = self.moments[stage, stage not in begun]
            others = sum(self.arriving[other] for other in begun if other != stage)
            yield _Moment(action, moment, others, now - self.kept[stage])
            if kind == "I":
                now += self.later[stage]
            else:
                begun.add(stage)
                now -= self.kept[stage] + (self.later[stage] if kind == "W" else 0.0)

    def held(self, moment: MemoryParts, others: float, waiting: float) -> MemoryParts:
        workspace = FRAGMENTATION * (moment.activations + waiting)
        return self.states + moment + MemoryParts(gradients=others, activations=waiting, workspace=workspace)


def most_kept(priced: Priced, stages: Sequence[Stage], order: Order) -> float:
    """Most bytes at once that the passes of one rank keep for later ones, outside any backward."""
    kept = {number: kept_of(priced, stages, number) for number in {action.stage for action in order}}
    now = most = 0.0
    for stage, kind, _ in order:
        if kind != "I":
            now += kept[stage] if kind == "F" else -kept[stage]
        most = max(most, now)
    return most


def _arriving(block: BlockPrice) -> float:
    """Bytes of the gradients that the first backward of a step brings into being."""
    return block.states.gradients - block.lasting_bytes


def kept_of(priced: Priced, stages: Sequence[Stage], number: int) -> float:
    """What a stage keeps of one microbatch, what it sends included."""
    stage = stages[number]
    inside = sum(priced.blocks[b].saved_bytes[stage.level(b)] for b in range(stage.first, stage.last + 1))
    sent = priced.blocks[stage.last + 1].send_bytes if number + 1 < len(stages) else 0.0
    return inside + (sent or 0.0)


def _stage_moment(blocks: Sequence[BlockPrice], stage: Stage, *, first: bool, prefetch: int) -> MemoryParts:
    """The fullest moment of the backward of one microbatch, without what is there all the time.

    first: of the step, so that gradients come into being. workspace: of what is recomputed.
    """
    saved = [block.saved_bytes[stage.level(stage.first + number)] for number, block in enumerate(blocks)]
    kept, gradients, leaving = sum(saved), 0.0 if first else sum(map(_arriving, blocks)), 0.0
    most, best = -1.0, MemoryParts()
    for number in range(len(blocks) - 1, -1, -1):
        block = blocks[number]
        recomputed = block.saved_bytes[0] - saved[number]
        ahead = sum(other.gathered_bytes for other in blocks[max(0, number - prefetch) : number])
        if block.scattered_bytes:
            inside = block.peak.unsharded + block.gathered_bytes + leaving
            # The gradients of the whole block, and the buffer that they leave from.
            end = block.peak.end + block.unsharded_bytes + block.scattered_bytes
            needed = max(inside, end)
        else:
            needed = (block.peak.arriving if first and _arriving(block) else block.peak.merged) + block.gathered_bytes
        transient = needed + ahead + recomputed
        workspace = FRAGMENTATION * recomputed
        if (total := gradients + kept + transient + workspace) > most:
            most = total
            best = MemoryParts(gradients=gradients, activations=kept, transient=transient, workspace=workspace)
        leaving = block.scattered_bytes
        kept -= saved[number]
        gradients += _arriving(block) if first else 0.0
    return best
