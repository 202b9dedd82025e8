"""Memory profile of a rank over a step, and its peak.

The peak is in some backward, while one block runs: activations saved for the blocks before it are still held, gradients
of the blocks after it are there already.

    stage, blocks a b c d        saved of one microbatch       gradients of parameters
    forward of d ends            a b c d                       none in the first microbatch, else all
    backward of d                a b c d  + d's own            that of d is made
    backward of c                a b c    + c's own            d, that of c is made
    ...
    after the last backward      nothing                       all, and the optimiser's workspace

What waits in host memory is on the device from the forward of a block to the end of the next one's, and comes back for
the backward of the block after it; so in a backward two blocks have it there, and after a forward the last of its
blocks.

The bytes of a block's own backward come from ``BlockBackward.peak``, and from what FSDP gathers and scatters: the
parameters of the block and of prefetched ones, gradients on their way out. Gradients that are reduced in buckets stay
allocated from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autopar.cost_model.communication.host_copies import HostCopies
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.schedule import Action, Kind, Order, work_of
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.pricing.block_prices import Priced
from autopar.search.stages.stage import Stage


def peak_memory(
    priced: Priced,
    stages: Sequence[Stage],
    order: Order,
    whole_copies: MemoryParts,
    *,
    prefetch: int,
    memory: StackMemory,
) -> MemoryParts:
    """Bytes of one rank at the peak of a step. stages: of the whole pipeline. order: of the rank's passes.

    whole_copies: bytes added to its states because parameters that two of its stages share are held once, but
    unsharded. memory: of the software stack.
    """
    rank = _Rank.of(priced, stages, order, whole_copies, prefetch, memory)
    largest, most, fragmentation = None, 0.0, memory.fragmentation
    alone: dict[_Key | None, float] = {None: 0.0}
    alone |= {key: own.total + fragmentation * own.activations for key, own in rank.peaks.items()}
    for own in rank.passes(order):
        if own.action.kind == "F":
            continue
        total = alone[own.key] + own.others + (1 + fragmentation) * own.waiting
        if total > most:
            largest, most = own, total
    peak = rank.states if largest is None else rank.held(largest)
    return max(peak, rank.resting, key=lambda parts: parts.total)


def memory_profile(
    priced: Priced,
    stages: Sequence[Stage],
    order: Order,
    whole_copies: MemoryParts,
    *,
    prefetch: int,
    memory: StackMemory,
) -> Iterator[tuple[Action, MemoryParts]]:
    """Bytes that one rank holds in each of its passes: at the end of a forward, at the peak of a backward.

    The arguments are those of ``peak_memory``, which is the largest of these, or the optimiser's.
    """
    rank = _Rank.of(priced, stages, order, whole_copies, prefetch, memory)
    for own in rank.passes(order):
        yield own.action, rank.held(own)


# Stage, what is computed, whether it is the first backward of the step.
_Key = tuple[int, Kind, bool]


class _Pass(NamedTuple):
    """key: of the bytes that the pass holds itself, in ``_Rank.peaks``; None if there are none. others: gradients of
    other stages. waiting: activations saved for other passes."""

    action: Action
    key: _Key | None
    others: float
    waiting: float


_NOTHING = MemoryParts()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """By stage of a rank: bytes of gradients that the first backward makes, of activations saved for a microbatch, of
    those on their way to host memory after a forward, and of what is held from the input-gradient to the
    weight-gradient pass; peaks: of backwards. work: what an action computes.

    states: held throughout. resting: held while the optimiser runs, when all gradients exist and no activation does.
    """

    states: MemoryParts
    resting: MemoryParts
    arriving: dict[int, float]
    kept: dict[int, float]
    sending: dict[int, float]
    delayed: dict[int, float]
    work: Callable[[Action], Kind | None]
    fragmentation: float
    peaks: dict[_Key, MemoryParts]

    @staticmethod
    def of(
        priced: Priced,
        stages: Sequence[Stage],
        order: Order,
        whole_copies: MemoryParts,
        prefetch: int,
        memory: StackMemory,
    ) -> _Rank:
        own = sorted({action.stage for action in order})
        inside = {number: priced.blocks[stages[number].first : stages[number].last + 1] for number in own}
        every = [block for blocks in inside.values() for block in blocks]
        lasting = sum(block.lasting_bytes for block in every) + whole_copies.gradients
        work = work_of if memory.first_delays else (lambda action: action.kind)
        done = {(action.stage, work(action)) for action in order if action.kind != "F"}
        return _Rank(
            states=replace(sum((block.states for block in every), whole_copies), gradients=lasting),
            resting=sum((b.resting for b in every), MemoryParts(transient=max(b.optimiser_bytes for b in every))),
            arriving={number: sum(map(_arriving, blocks)) for number, blocks in inside.items()},
            kept={number: kept_of(priced.blocks, stages, number) for number in own},
            sending={number: sending_of(priced.blocks, stages[number]) for number in own},
            delayed={number: sum(block.delayed_bytes for block in inside[number]) for number in own},
            work=work,
            fragmentation=memory.fragmentation,
            peaks={
                (number, kind, first): _backward_peak(
                    inside[number],
                    stages[number],
                    kind,
                    first=first,
                    prefetch=prefetch,
                    fragmentation=memory.fragmentation,
                )
                for number, kind in done
                if kind is not None
                for first in (False, True)
            },
        )

    def passes(self, order: Order) -> Iterator[_Pass]:
        now, begun = 0.0, set[int]()
        others, every = dict.fromkeys(self.kept, 0.0), 0.0
        for action in order:
            stage, kind = action.stage, self.work(action)
            if kind == "F":
                now += self.kept[stage]
                yield _Pass(action, None, every, now + self.sending[stage])
                continue
            if kind is None:
                yield _Pass(action, None, others[stage], now)
                continue
            before = self.delayed[stage] if kind == "W" else self.kept[stage]
            yield _Pass(action, (stage, kind, stage not in begun), others[stage], now - before)
            now += (self.delayed[stage] if kind == "I" else 0.0) - before
            if kind != "I" and stage not in begun:
                begun.add(stage)
                every = sum(self.arriving[other] for other in begun)
                others = {own: sum(self.arriving[other] for other in begun if other != own) for own in others}

    def held(self, own: _Pass) -> MemoryParts:
        """Bytes in a pass."""
        inside = _NOTHING if own.key is None else self.peaks[own.key]
        workspace = self.fragmentation * (inside.activations + own.waiting)
        waiting = MemoryParts(gradients=own.others, activations=own.waiting, workspace=workspace)
        return self.states + inside + waiting


def most_kept(blocks: Sequence[BlockPrice], stages: Sequence[Stage], order: Order) -> float:
    """Most bytes of activations that the passes of one rank hold on the device for later ones, outside any backward."""
    own = {action.stage for action in order}
    kept = {number: kept_of(blocks, stages, number) for number in own}
    return _most(order, kept, {number: sending_of(blocks, stages[number]) for number in own})


def most_on_host(blocks: Sequence[BlockPrice], stages: Sequence[Stage], order: Order) -> float:
    """Most bytes of activations that the passes of one rank have in host memory."""
    own = {action.stage for action in order}
    sent = {number: sum(copies.num_bytes for copies in _copies(blocks, stages[number])) for number in own}
    return _most(order, sent, dict.fromkeys(own, 0.0))


def _most(order: Order, held: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Most bytes at the end of a pass. held: by stage, from a forward to its backward. after: at the end of a
    forward."""
    now = most = 0.0
    for stage, kind, _ in order:
        if kind != "I":
            now += held[stage] if kind == "F" else -held[stage]
        most = max(most, now + (after[stage] if kind == "F" else 0.0))
    return most


def _copies(blocks: Sequence[BlockPrice], stage: Stage) -> list[HostCopies]:
    """Of each block of a stage."""
    return [blocks[b].host[stage.level(b)] for b in range(stage.first, stage.last + 1)]


def sending_of(blocks: Sequence[BlockPrice], stage: Stage) -> float:
    """Bytes on their way to host memory when a forward of a stage ends: of the last block that sends any."""
    return next((copies.num_bytes for copies in reversed(_copies(blocks, stage)) if copies.num_bytes), 0.0)


def _arriving(block: BlockPrice) -> float:
    """Bytes of the gradients that the first backward of a step allocates."""
    return block.states.gradients - block.lasting_bytes


def kept_of(blocks: Sequence[BlockPrice], stages: Sequence[Stage], number: int) -> float:
    """Bytes of activations that a stage saves for one microbatch on the device, those that it sends included, and what
    it receives: the pipeline holds both."""
    stage = stages[number]
    inside = sum(blocks[b].saved_bytes[stage.level(b)] for b in range(stage.first, stage.last + 1))
    inside += blocks[stage.first].shared_bytes
    sent = blocks[stage.last + 1].send_bytes if number + 1 < len(stages) else 0.0
    received = _copies(blocks, stage)[0].input_bytes if number else 0.0
    return inside + received + (sent or 0.0)


def _backward_peak(
    blocks: Sequence[BlockPrice], stage: Stage, kind: Kind, *, first: bool, prefetch: int, fragmentation: float
) -> MemoryParts:
    """Peak of the backward of one microbatch, or of one part of it, without bytes held throughout.

    first: of the step, so that gradients are allocated. workspace: of recomputed activations.
    """
    saved = [block.saved_bytes[stage.level(stage.first + number)] for number, block in enumerate(blocks)]
    delayed = [0.0 if kind == "B" else block.delayed_bytes for block in blocks]
    if kind == "W":
        saved = delayed
    # What blocks share stays until the first of them is through.
    kept, gradients, leaving = (
        sum(saved) + blocks[0].shared_bytes * (kind != "W"),
        0.0 if first else sum(map(_arriving, blocks)),
        0.0,
    )
    # Fetched ahead while a block runs: of the nearest one before it; at last, if it is of this stage, of the next pass.
    copies = [block.host[stage.level(stage.first + number)].num_bytes for number, block in enumerate(blocks)]
    next_pass = next(filter(None, reversed(copies)), 0.0)
    fetched = list(accumulate(copies, lambda before, own: own or before, initial=0.0))
    fetched = [own or next_pass for own in fetched]
    most, best = -1.0, MemoryParts()
    for number in range(len(blocks) - 1, -1, -1):
        block = blocks[number]
        level = stage.level(stage.first + number)
        recomputed, peak = 0.0 if kind == "W" else block.recomputed_bytes(level), block.peak_of(level)
        ahead = sum(other.gathered_bytes for other in blocks[max(0, number - prefetch) : number])
        ahead += next_pass if kind == "W" else fetched[number]
        if block.scattered_bytes:
            inside = peak.unsharded + block.gathered_bytes + leaving
            # The gradients of the whole block, and the buffer that they leave from.
            end = peak.end + block.unsharded_bytes + block.scattered_bytes
            needed = max(inside, end)
        else:
            needed = (peak.arriving if first and _arriving(block) else peak.merged) + block.gathered_bytes
        transient = needed + ahead + recomputed
        workspace = fragmentation * recomputed
        if (total := gradients + kept + transient + workspace) > most:
            most = total
            best = MemoryParts(gradients=gradients, activations=kept, transient=transient, workspace=workspace)
        leaving = block.scattered_bytes
        kept += (delayed[number] if kind == "I" else 0.0) - saved[number]
        gradients += _arriving(block) if first and kind != "I" else 0.0
    return best
