"""The least that the ops of a model can take: every op perfectly divided over the ranks of a stage.

For one microbatch of M on n ranks, with the roofline of ``op_roofline`` (a shard is never less than an n-th):

    sum over ops   max( FLOPs / (n M peak),  (batch bytes / M + other bytes) / (n bandwidth) )  +  launches

forward and backward alike. Launches are what makes many small microbatches slow on small models. A microbatch on its
way through all stages and back waits for what no schedule can put off: everything but the gradients of weights.

Where memory is short, blocks are rematerialised. With what they keep perfectly divided as well, and each level taken by
any share of the blocks of a kind, the least time for that is a fractional knapsack: of the steps from level to level
those go first that take least seconds for each byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from torch import fx

from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.cost_model.memory.saved_tensors import Saved
from autopar.search.assign.instance import Floats, Ints
from autopar.search.pricing.price_cache import OpPrices

# A row of ``Work`` for an op that takes no time.
NOTHING = (0.0,) * 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Passes of ops: seconds of all samples on one device, by what bounds them, and of launches."""

    flops_s: Floats
    flops_batch: Floats
    batch_bytes_s: Floats
    other_bytes_s: Floats
    launch_s: Floats

    @classmethod
    def of(cls, rows: list[tuple[float, ...]]) -> Work:
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
        return cls(
            flops_s=table[:, 0],
            flops_batch=table[:, 1],
            batch_bytes_s=table[:, 2],
            other_bytes_s=table[:, 3],
            launch_s=table[:, 4],
        )

    def seconds(self, num_ranks: int, num_microbatches: int) -> Floats:
        """Of one microbatch on ``num_ranks``."""
        flops = self.flops_s / np.where(self.flops_batch > 0, num_microbatches, 1)
        moved = self.batch_bytes_s / num_microbatches + self.other_bytes_s
        seconds: Floats = np.maximum(flops, moved) / num_ranks + self.launch_s
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """What the blocks of one kind keep, and run again, all together.

    forward: passes of its ops, nothing for those that a second run does not reach. light: 1 of those that run again at
    level selective. batch_bytes, other_bytes: kept at each of LEVELS, over all ranks: of the whole batch, and what is
    no part of the batch. every_second: the products that level alternate does not keep, by their place in ``forward``,
    each with these bytes of its own.
    """

    forward: Work
    light: Floats
    batch_bytes: Floats
    other_bytes: Floats
    every_second: Ints
    second_batch_bytes: Floats
    second_other_bytes: Floats

    @classmethod
    def of(cls, ops: OpPrices, kind: int, nodes: Sequence[fx.Node]) -> Kept:
        workload, found = ops.workload, ops.workload.activations[kind]
        repeats = workload.folding.kinds[kind].repeats
        contracts = [float(is_contraction(node, workload.rule(node))) for node in nodes]
        saved = [tensor for node in nodes for tensor in workload.kept.get(node, ())]
        fewer = [tensor for tensor in found.kept if tensor.node not in found.every_second]
        levels = saved, (*found.inputs, *found.kept), (*found.inputs, *fewer), found.inputs
        size = [[repeats * _distinct_bytes(tensors, batch) for tensors in levels] for batch in (True, False)]
        second = [number for number, node in enumerate(nodes) if node in found.every_second]
        results = [[tensor for tensor in found.kept if tensor.node is nodes[number]] for number in second]
        own = [[repeats * _distinct_bytes(tensors, batch) for tensors in results] for batch in (True, False)]
        return cls(
            forward=Work.of(
                [NOTHING if node in found.unreached else _forward(ops.cost(node), repeats) for node in nodes]
            ),
            light=np.array([1.0 - share for share in contracts]),
            batch_bytes=np.array(size[0]),
            other_bytes=np.array(size[1]),
            every_second=np.array(second, dtype=np.int64),
            second_batch_bytes=np.array(own[0]),
            second_other_bytes=np.array(own[1]),
        )

    def steps(self, num_ranks: int, num_microbatches: int) -> tuple[float, list[tuple[float, float]]]:
        """Bytes of a microbatch on a rank at no rematerialisation, and (bytes, seconds) of the steps from there to the
        strongest that pays, each dearer by the byte than the one before."""
        kept = (self.batch_bytes / num_microbatches + self.other_bytes) / num_ranks
        forward = self.forward.seconds(num_ranks, num_microbatches)
        light = float(self.light @ forward)
        second = (self.second_batch_bytes / num_microbatches + self.second_other_bytes) / num_ranks
        # Where a product is not kept anyway it does not run again, so others may be all that does: the cheapest.
        saves = second > 0.0
        rate = float(np.min(forward[self.every_second][saves] / second[saves])) if saves.any() else 0.0
        seconds = 0.0, light, light + rate * float(kept[1] - kept[2]), float(forward.sum())
        now = 0
        found: list[tuple[float, float]] = []
        while True:
            further = [
                ((seconds[level] - seconds[now]) / (kept[now] - kept[level]), level)
                for level in range(now + 1, len(kept))
                if kept[level] < kept[now]
            ]
            if not further:
                return float(kept[0]), found
            _, level = min(further)
            found.append((float(kept[now] - kept[level]), float(seconds[level] - seconds[now])))
            now = level


def _distinct_bytes(tensors: Iterable[Saved], batch: bool) -> float:
    sizes = {tensor.storage: tensor.num_bytes for tensor in tensors if tensor.carries_batch is batch}
    return sum(sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floor:
    """passes: of every op, forward and backward; on_path: the share of each that a microbatch waits for. kept: of each
    kind of block."""

    passes: Work
    on_path: Floats
    kept: tuple[Kept, ...]

    @classmethod
    def of(cls, ops: OpPrices) -> Floor:
        workload = ops.workload
        passes, on_path = [], []
        inside: list[list[fx.Node]] = [[] for _ in workload.folding.kinds]
        for node, repeats in workload.repeats.items():
            block = workload.folding.block_of.get(node)
            if block is None:
                continue
            inside[workload.folding.blocks[block].kind].append(node)
            cost = ops.cost(node)
            passes.append(_forward(cost, repeats))
            on_path.append(1.0)
            if not cost.free_backward:
                passes.append(_row(cost, cost.backward_flops, True, repeats))
                on_path.append(1.0 - workload.weights_share(node))
        return cls(
            passes=Work.of(passes),
            on_path=np.array(on_path),
            kept=tuple(Kept.of(ops, kind, nodes) for kind, nodes in enumerate(inside)),
        )

    def microbatch_s(self, num_ranks: int, num_microbatches: int) -> float:
        """Least seconds that all blocks together take for one microbatch on a stage mesh of ``num_ranks``."""
        return float(self.passes.seconds(num_ranks, num_microbatches).sum())

    def path_s(self, num_ranks: int, num_microbatches: int) -> float:
        """Least seconds from the start of a microbatch's forward to the end of its backward, under any schedule."""
        return float(self.passes.seconds(num_ranks, num_microbatches) @ self.on_path)

    def again_s(self, num_ranks: int, num_microbatches: int, room_bytes: float) -> float:
        """Least seconds that all blocks together run again for one microbatch, so that what the ranks of one place in
        every stage keep of it comes to ``room_bytes``; inf if it is more in any case."""
        over, steps = -room_bytes, []
        for kind in self.kept:
            kept, own = kind.steps(num_ranks, num_microbatches)
            over += kept
            steps += own
        seconds = 0.0
        for num_bytes, more_s in sorted(steps, key=lambda step: step[1] / step[0]):
            if over <= 0:
                break
            seconds += more_s * min(1.0, over / num_bytes)
            over -= num_bytes
        return seconds if over <= 0 else inf


def _forward(cost: OpCost, repeats: int) -> tuple[float, ...]:
    return NOTHING if cost.free else _row(cost, cost.flops, False, repeats)


def _row(cost: OpCost, flops: float, backward: bool, repeats: int) -> tuple[float, ...]:
    tensors = (*cost.backward_read, *cost.backward_written) if backward else (*cost.read, *cost.written)
    seconds = cost.device.memory_seconds
    return (
        repeats * flops / (cost.rate.peak_flops * cost.efficiency),
        float(cost.carries_batch),
        repeats * seconds(sum(t.num_bytes for t in tensors if t.carries_batch)),
        repeats * seconds(sum(t.num_bytes for t in tensors if not t.carries_batch)),
        repeats * cost.launches[backward] * cost.device.kernel_launch_s,
    )
