"""Least seconds of a model's ops: every op perfectly divided over the ranks of a stage.

For one microbatch of M on n ranks, with the roofline of ``op_roofline`` (a shard is never less than an n-th):

    sum over ops   max( FLOPs / (n M peak),  (batch bytes / M + other bytes) / (n bandwidth) )  +  launches

forward and backward alike. Launches make many small microbatches slow on small models. A microbatch on its way through
all stages and back waits for all passes but the gradients of weights, which a schedule may put off.

Where memory is short, blocks are rematerialised. With the saved activations perfectly divided as well, and each level
taken by any share of the blocks of a kind, the least recomputation is a fractional knapsack: of the steps from level to
level those with the fewest seconds for each byte are taken first.
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
    """Passes of ops: seconds of the global batch on one device, separately by what bounds them, and of kernel launches.
    One row an op."""

    flops_s: Floats
    flops_batch: Floats
    batch_bytes_s: Floats
    other_bytes_s: Floats
    launch_s: Floats

    @classmethod
    def of(cls, rows: list[tuple[float, ...]]) -> Work:
        """From one row of (FLOPs s, batch flag, batch bytes s, other bytes s, launch s) for each pass."""
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
        return cls(
            flops_s=table[:, 0],
            flops_batch=table[:, 1],
            batch_bytes_s=table[:, 2],
            other_bytes_s=table[:, 3],
            launch_s=table[:, 4],
        )

    def seconds(self, num_ranks: int, num_microbatches: int) -> Floats:
        """Seconds of each pass for one microbatch on ``num_ranks``."""
        flops = self.flops_s / np.where(self.flops_batch > 0, num_microbatches, 1)
        moved = self.batch_bytes_s / num_microbatches + self.other_bytes_s
        seconds: Floats = np.maximum(flops, moved) / num_ranks + self.launch_s
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """Saved activations and recomputation of all blocks of one kind together.

    forward: passes of its ops, zero for ops that recomputation does not reach. light: 1 for ops that level selective
    recomputes. batch_bytes, other_bytes: saved at each of LEVELS, over all ranks: of the global batch, and of tensors
    without a batch dimension. every_second: the products that level alternate does not save, by their place in
    ``forward``, each with its own bytes.
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
        """Of the blocks of kind ``kind``, whose first block has the ops ``nodes``."""
        workload, found = ops.workload, ops.workload.kept(ops.memory).blocks[kind]
        repeats = workload.repetition.kinds[kind].repeats
        contracts = [float(is_contraction(node, workload.rule(node))) for node in nodes]
        surely = workload.kept(ops.memory).surely
        saved = [tensor for node in nodes for tensor in surely.get(node, ())]
        # In chunks neither op of a loss is recomputed, and its logits are not saved.
        chunkable = {node for loss in found.losses for node in loss.pair}
        kept = [tensor for tensor in found.kept if tensor.node not in chunkable]
        fewer = [tensor for tensor in kept if tensor.node not in found.every_second]
        inputs = workload.kept(ops.memory).inputs(kind)
        levels = saved, (*inputs, *kept), (*inputs, *fewer), inputs
        size = [[repeats * _distinct_bytes(tensors, batch) for tensors in levels] for batch in (True, False)]
        second = [number for number, node in enumerate(nodes) if node in found.every_second]
        results = [[tensor for tensor in kept if tensor.node is nodes[number]] for number in second]
        own = [[repeats * _distinct_bytes(tensors, batch) for tensors in results] for batch in (True, False)]
        return cls(
            forward=Work.of(
                [
                    NOTHING if node in found.unreached | chunkable else _forward(ops.cost(node), repeats)
                    for node in nodes
                ]
            ),
            light=np.array([1.0 - share for share in contracts]),
            batch_bytes=np.array(size[0]),
            other_bytes=np.array(size[1]),
            every_second=np.array(second, dtype=np.int64),
            second_batch_bytes=np.array(own[0]),
            second_other_bytes=np.array(own[1]),
        )

    def steps(self, num_ranks: int, num_microbatches: int) -> tuple[float, list[tuple[float, float]]]:
        """Bytes of a microbatch on a rank without rematerialisation, and (bytes, seconds) of the steps from there to
        the strongest level that pays, in ascending order of seconds a byte."""
        kept = (self.batch_bytes / num_microbatches + self.other_bytes) / num_ranks
        forward = self.forward.seconds(num_ranks, num_microbatches)
        light = float(self.light @ forward)
        second = (self.second_batch_bytes / num_microbatches + self.second_other_bytes) / num_ranks
        # A product that is not saved in any case costs no recomputation, so only the cheapest others may have to.
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
class IdealDivision:
    """A model whose ops are all perfectly divided.

    passes: of every op, forward and backward. on_path: the share of each that a microbatch waits for. kept: of each
    kind of block.
    """

    passes: Work
    on_path: Floats
    kept: tuple[Kept, ...]

    @classmethod
    def of(cls, ops: OpPrices) -> IdealDivision:
        """Of the model whose ops ``ops`` prices."""
        workload = ops.workload
        passes, on_path = [], []
        inside: list[list[fx.Node]] = [[] for _ in workload.repetition.kinds]
        for node, repeats in workload.repeats.items():
            block = workload.repetition.block_of.get(node)
            if block is None:
                continue
            inside[workload.repetition.blocks[block].kind].append(node)
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

    def recomputed_s(self, num_ranks: int, num_microbatches: int, room_bytes: float) -> float:
        """Least seconds of recomputation of one microbatch in all blocks, so that the activations saved for it on the
        ranks of one place in every stage come to ``room_bytes``; inf if no level saves that few."""
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
