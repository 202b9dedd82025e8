"""A step of a plan as tasks on streams: in detail the overlap for which the search has a closed form.

One rank of each place in the pipeline, block by block:

    compute   F0 blocks ........................  B0 blocks, the last first ....................  optimiser
    gather      next blocks' parameters (ZeRO)      again, where they were resharded
    reduce                                              gradients of a block, once it is through
    send                  activations                            gradients of what was received

A gather is issued ``prefetch`` blocks before the block that waits for it; of a stack that gathers ahead, those of once
a step when the rank begins the stage before. Communication inside blocks, over tensor, sequence and expert axes, is
waited for where it stands, so it counts as part of the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost_model.communication.gradient_sync import BucketSync, SyncTime
from autopar.cost_model.schedule.stream_simulator import COMPUTE, Span, Streams
from autopar.ir.pairs import paired
from autopar.ir.schedule import Action, Pipelining, work_of
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.stages.stage import Stage

GATHER, REDUCE, SEND = "gather", "reduce", "send"
STREAMS = (COMPUTE, GATHER, REDUCE, SEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of the tasks of a step.

    sends, returns: seconds from each stage to the next, and of the gradients back. prelude_s: of every microbatch of
    every stage. names: of the blocks. launch_s: of the optimiser's kernel. passing_s: seconds of each stage's compute
    spent on sends and receives in a pass. shared_s: ranks of the pipeline whose stages share parameters -> seconds to
    all-reduce their gradients. gathers_ahead: as of ``Stack``. sends_slow: how much longer compute takes beside sends
    and those all-reduces. hidden_s: of a forward and a backward that run at once, seconds that they hide of each other;
    None where passes run one after the other.
    """

    blocks: Sequence[BlockPrice]
    names: Sequence[str]
    stages: Sequence[Stage]
    shape: Pipelining
    sends: Sequence[float]
    returns: Sequence[float]
    prefetch: int
    gathers_ahead: bool
    sends_slow: float
    prelude_s: float
    launch_s: float
    passing_s: Sequence[float]
    shared_s: Mapping[tuple[int, ...], float]
    hidden_s: Callable[[Action, Action], float] | None = None

    def blocks_of(self, stage: int) -> range:
        """Indices of the blocks of a stage."""
        return range(self.stages[stage].first, self.stages[stage].last + 1)


class BlockPass(NamedTuple):
    """One block in one action. first, last: whether it is the first forward and the last backward of the block.

    opens: whether the block is the first in the action, which receives and, once it is through, sends.
    """

    block: int
    action: Action
    first: bool
    last: bool
    opens: bool


def step_tasks(costs: StepCosts) -> StepTasks:
    """The tasks of a step."""
    built = StepTasks(costs)
    for rank, order in enumerate(costs.shape.orders()):
        built.rank(rank, order)
    return built


def run_step(costs: StepCosts) -> list[Span]:
    """Every task of a step with the time it ran, in the order of their ends."""
    return step_tasks(costs).streams.run()


def pass_ends(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    """(rank, pass) -> when its last block was through."""
    return {(span.rank, span.name.split(" ")[0]): span.end_s for span in spans if span.stream == COMPUTE}


@dataclass(slots=True)
class StepTasks:
    """The tasks of a step. passes: number of a task -> the passes of blocks that it is, or that it communicates for."""

    costs: StepCosts
    passes: dict[int, list[BlockPass]] = field(default_factory=dict)
    streams: Streams = field(default_factory=Streams)
    # (stage, microbatch, backward): the task that brings a stage its input, or the gradient of its output.
    arrivals: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    # Rank -> the task after which all its own sums of gradients are done.
    summed: dict[int, int] = field(default_factory=dict)

    def arrival(self, stage: int, microbatch: int, backward: bool) -> int:
        """Number of the task that brings ``stage`` its input of ``microbatch``, or the gradient of its output;
        reserved if new."""
        key = stage, microbatch, backward
        if key not in self.arrivals:
            self.arrivals[key] = self.streams.reserve()
        return self.arrivals[key]

    def rank(self, rank: int, order: Sequence[Action]) -> None:
        """Add all tasks of one rank. The tasks of its compute stream, block by block, are ``passed``."""
        passed: list[int] = []
        reductions: list[int] = []
        left = dict.fromkeys(self.costs.shape.stages_of(rank), self.costs.shape.num_microbatches)
        # Stage -> the compute task before its first forward, if there is one; and that of the stage before, to gather.
        begun: dict[int, list[int]] = {}
        ready: list[int] | None = None
        hides = self.costs.hidden_s
        pairs = {} if hides is None else {own[1]: hides(*own) for own in paired(order) if len(own) == 2}
        for action in order:
            stage, kind, _ = action
            first = kind == "F" and stage not in begun
            if first:
                ready = list(begun.values())[-1] if begun and self.costs.gathers_ahead else None
                begun[stage] = passed[-1:]
            if kind in "BW":
                left[stage] -= 1
            last = kind in "BW" and not left[stage]
            self._action(rank, action, passed, reductions, ready, pairs.get(action, 0.0), first=first, last=last)
        mine = [b for stage in left for b in self.costs.blocks_of(stage)]
        seconds = sum(self.costs.blocks[b].optimiser_s for b in mine) + self.costs.launch_s
        sharing = {holders: seconds for holders, seconds in self.costs.shared_s.items() if rank in holders}
        if sharing:
            self.streams.add(rank, REDUCE, "own gradients", 0.0, (*passed[-1:], *reductions), self._summed(rank))
        for holders, shared in sharing.items():
            others = [self._summed(other) for other in holders]
            slowdown = self.costs.sends_slow
            reductions.append(self.streams.add(rank, REDUCE, "shared gradients", shared, others, slowdown=slowdown))
        self.streams.add(rank, COMPUTE, "optimiser", seconds, reductions)

    def _summed(self, rank: int) -> int:
        if rank not in self.summed:
            self.summed[rank] = self.streams.reserve()
        return self.summed[rank]

    def _action(
        self,
        rank: int,
        action: Action,
        passed: list[int],
        reductions: list[int],
        begins: list[int] | None,
        hidden_s: float,
        *,
        first: bool,
        last: bool,
    ) -> None:
        """begins: what the gathers of a first forward wait for, if not for the compute before their blocks. hidden_s:
        what the forward that runs at the same time hides of the action."""
        costs, shape = self.costs, self.costs.shape
        stage, kind, microbatch = action
        after = self._predecessors(rank, action)
        inside = costs.blocks_of(stage)
        blocks = inside if kind == "F" else inside[::-1]
        own = [BlockPass(block, action, first, last, block == blocks[0]) for block in blocks]
        beside = [self._beside(one) for one in own]
        left = 1.0 - hidden_s / (sum(map(self._work, own)) or 1.0)
        if not any(gather or reduce for gather, reduce in beside):
            # Nothing runs beside it, so it is one task.
            passed.append(self._add(rank, COMPUTE, str(action), left * sum(map(self._work, own)), after, own))
        else:
            for one, (gather, reduce) in zip(own, beside, strict=True):
                name = f"{action} {costs.names[one.block]}"
                if gather:
                    ready = passed[-costs.prefetch - 1 : -costs.prefetch] if len(passed) > costs.prefetch else []
                    ready = begins if first and begins is not None else ready
                    after = [*after, self._add(rank, GATHER, name, gather, ready, [one])]
                passed.append(self._add(rank, COMPUTE, name, left * self._work(one), after, [one]))
                after = []
                if reduce:
                    reductions.append(self._add(rank, REDUCE, name, reduce, passed[-1:], [one]))
        backward = kind != "F"
        other = stage - 1 if backward else stage + 1
        if kind != "W" and 0 <= other < shape.num_stages and shape.rank_of(other) != rank:
            seconds = costs.returns[other] if backward else costs.sends[stage]
            number = self.arrival(other, microbatch, backward)
            self._add(rank, SEND, f"{action} to stage {other}", seconds, passed[-1:], own, number)

    def _predecessors(self, rank: int, action: Action) -> list[int]:
        """What has to have come from another stage."""
        shape = self.costs.shape
        stage, kind, microbatch = action
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < shape.num_stages or shape.rank_of(source) == rank:
            return []
        return [self.arrival(stage, microbatch, kind != "F")]

    def _add(
        self,
        rank: int,
        stream: str,
        name: str,
        work_s: float,
        after: Sequence[int],
        passes: list[BlockPass],
        number: int | None = None,
    ) -> int:
        slowdown = 0.0 if stream == COMPUTE else self.costs.sends_slow if stream == SEND else self._slowdown(passes)
        number = self.streams.add(rank, stream, name, work_s, after, number, slowdown)
        self.passes[number] = passes
        return number

    def _slowdown(self, passes: Sequence[BlockPass]) -> float:
        """How much longer compute takes beside the gathers and reductions of these blocks."""
        sync = sum((self.costs.blocks[one.block].sync for one in passes), BucketSync())
        beside_s, lost_s = sync.beside.total_s(1), sync.lost.total_s(1)
        return lost_s / (beside_s - lost_s)

    def _work(self, one: BlockPass) -> float:
        return sum(self.compute(one).values())

    def compute(self, one: BlockPass) -> dict[str, float]:
        """Seconds on the compute stream, by purpose: parts of a pass, and communication that it waits for.

        inputs, weights: of a backward, for the gradients of the block's inputs and of its parameters; twice: work
        that a split backward does in both passes. recomputation: in a forward, what noting takes that is kept. host:
        what copies to host memory and back add.
        """
        block, costs, stage, kind = self.costs.blocks[one.block], self.costs, one.action.stage, work_of(one.action)
        passing = costs.passing_s[stage] if one.opens and one.action.kind != "W" else 0.0
        gather, reduce = communication_of(block.sync.waited, one)
        found = {"passing": passing, "gather": gather, "reduce": reduce}
        level = costs.stages[stage].level(one.block)
        added, recomputed, computed = block.host[level].added, block.recomputed[level], block.computed()
        if kind == "F":
            found["prelude"] = costs.prelude_s if one.block == costs.stages[stage].first else 0.0
            found["recomputation"], found["host"] = recomputed.forward_s, added.forward_s
            return {**found, "forward": computed.forward_s}
        if kind in ("B", "I"):
            found["recomputation"], found["host"] = recomputed.backward_s, added.backward_s
            found["inputs"] = computed.backward_s - block.weights_s
        if kind in ("B", "W"):
            found["weights"] = block.weights_s
            found["twice"] = block.twice_s if kind == "W" else 0.0
        return found

    def _beside(self, one: BlockPass) -> tuple[float, float]:
        """Seconds on the streams of communication: gathered before a block, and reduced after it."""
        return communication_of(self.costs.blocks[one.block].sync.beside, one)


def communication_of(sync: SyncTime, one: BlockPass) -> tuple[float, float]:
    """Seconds of the communication of a block's parameters before a pass of the block, and after the pass."""
    kind = work_of(one.action)
    if kind is None:
        return 0.0, 0.0
    if kind == "F":
        return sync.forward_s + (sync.first_s if one.first else 0.0), 0.0
    after = sync.backward_s - sync.regather_s + (sync.step_s - sync.first_s if one.last else 0.0)
    return 0.0 if kind == "W" else sync.regather_s, 0.0 if kind == "I" else after
