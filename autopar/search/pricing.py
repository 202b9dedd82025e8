"""Prices on one stage mesh: of an op, of a redistribution, of a parameter. Seconds and bytes of one rank.

Everything that plans are compared by comes from here, in the search and in the prediction of a finished plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import numpy as np
from torch import fx

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import Fabric
from autopar.cost_model.experts import Loads
from autopar.cost_model.hardware import ITEMSIZE
from autopar.cost_model.lowerings import lowering_time
from autopar.cost_model.memory import MemoryParts, gathered_bytes, scattered_bytes, state_memory
from autopar.cost_model.ops import OpCost
from autopar.cost_model.redistributions import LinkPrices, Times
from autopar.cost_model.seconds import NOTHING, ZERO, Affine, OpTime
from autopar.cost_model.step import SyncTime, buffer_copies, master_work, offload_time, optimizer_time, sync_time
from autopar.ir.mesh import Mesh
from autopar.ir.parameters import ALONE_BYTES
from autopar.ir.placement import Layout, Partial, Replicate, Shard
from autopar.ir.rule import Assignment, Choice, factors_of_choice
from autopar.search.codes import Moves, encode, encode_need, rows_class
from autopar.search.instance import Floats, Ints, User
from autopar.search.options import Codes, Options
from autopar.search.workload import Tensor, Workload

# Bytes at which affine costs are sampled.
_SAMPLE = 1e6

MASTER = 4  # bytes of a stored parameter and of its gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPrice:
    """One parameter under its uses.

    numel: elements that a rank has of it before ZeRO, which cuts it into ``shards``. sync_axes: gradients are summed
    over these, once a step; zero_axes: those of them that ZeRO works over. micro: added to every microbatch (casts,
    redistributions of later uses), cast_s of it for casts. zero, reshard: level, and whether level 3 gives it back
    after forward.
    """

    numel: float
    requires_grad: bool
    sync_axes: tuple[int, ...]
    zero_axes: tuple[int, ...]
    micro: OpTime
    cast_s: float
    zero: int
    reshard: bool
    shards: int


@dataclass(slots=True)
class OpPrices:
    """Seconds of ops, by the degrees of their factors: the same on every mesh. Remembers what it has worked out.

    balanced: sequences that ranks share are folded, so that a causal attention is equal work for all. loads: rows that
    experts got, by layer.
    """

    workload: Workload
    cluster: Cluster
    balanced: bool = False
    loads: Loads = ()
    codes: Codes = field(init=False)
    _costs: dict[fx.Node, OpCost] = field(default_factory=dict)
    _times: dict[tuple[object, ...], OpTime] = field(default_factory=dict)
    # Seconds of a microbatch of all members of a cluster, by its number, that of microbatches, and degrees.
    totals: dict[tuple[int, int, bytes], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.codes = Codes(self.workload)

    def cost(self, node: fx.Node) -> OpCost:
        found = self._costs.get(node)
        if found is None:
            load = self.workload
            found = self._costs[node] = OpCost.of(
                node,
                load.rule(node),
                self.cluster.device,
                precision=load.precision,
                batch_factor=load.roles.batch.get(node),
                needs_grad=load.differentiable,
                balanced=self.balanced,
                loads=self.loads,
            )
        return found

    def time(self, node: fx.Node, assignment: Assignment, mesh: Mesh, num_microbatches: int) -> OpTime:
        degrees: dict[Choice, int] = {}
        for choice, axis in zip(assignment, mesh.axes, strict=True):
            if factors_of_choice(choice):
                degrees[choice] = degrees.get(choice, 1) * axis.size
        key = (node, num_microbatches, *sorted(degrees.items()))
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self.cost(node).time(assignment, mesh, num_microbatches)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowShape:
    """A flow of the inner problem but for the bytes of its tensor; see ``instance.Flow``.

    summed: for what a derived op makes, (mesh axes, pieces) -> 1 where the gradient of so large a part of it is summed
    over them once a step, with the gradients of parameters, 0 elsewhere.
    """

    sources: Ints
    users: tuple[User, ...]
    fixed: Floats
    per_byte: Floats
    summed: Mapping[tuple[tuple[int, ...], int], Floats] = field(default_factory=dict)

    @property
    def costs(self) -> bool:
        """Whether anything costs anything."""
        return bool(self.summed or self.fixed.any() or self.per_byte.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterShape:
    """How a group of parameters may be stored and used: (value, gradient) layouts.

    states: of the uses by the unit that decides where it is stored; state_of: the state, by option of that unit.
    later: of the other uses, with what their options need.
    """

    states: Sequence[Sequence[tuple[Layout, Layout]]]
    state_of: Ints
    later: Sequence[tuple[User, Sequence[tuple[Layout, Layout]]]]


@dataclass(slots=True)
class MeshPrices:
    """Seconds of communication on a mesh, affine in the bytes; the names of its axes do not matter.

    options: of each cluster, in its inner problems so far. shapes: flows of those. stored: their parameters.
    evaluated: what ``evaluate`` knows of answers, by what it is.
    """

    fabric: Fabric
    known: Moves
    options: dict[tuple[object, ...], Options] = field(default_factory=dict)
    shapes: dict[tuple[object, ...], FlowShape] = field(default_factory=dict)
    stored: dict[tuple[int, ...], ParameterShape] = field(default_factory=dict)
    evaluated: dict[str, dict[Any, Any]] = field(default_factory=dict)
    links: LinkPrices = field(init=False)
    _times: dict[float, Times] = field(default_factory=dict)
    _lowerings: dict[tuple[fx.Node, Assignment, int], OpTime] = field(default_factory=dict)
    _rates: dict[tuple[tuple[int, ...], int, str], SyncTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = LinkPrices.of(self.fabric)

    @property
    def mesh(self) -> Mesh:
        return self.fabric.mesh

    def move(self, source: Layout, value: Layout, grad: Layout, differentiable: bool, rows: float = inf) -> Affine:
        """Redistribution of a tensor, by the bytes of its microbatch (all ranks of the stage together).

        rows: size of dimension 0 of the microbatch.
        """
        codes = np.array([encode(source)]), np.array([encode_need(value, grad)])
        number = self.known.numbers(*codes, differentiable)
        return self._at(rows_class(rows, self.mesh)).at(int(number[0, 0]))

    def table(self, sources: Ints, needs: Ints, differentiable: bool, rows: float) -> tuple[Floats, Floats]:
        """Fixed seconds and seconds per byte, both directions together, of every (source, need), all in codes.

        rows: a ``rows_class``.
        """
        numbers = self.known.numbers(sources, needs, differentiable)
        times = self._at(rows)
        fixed = times.forward_fixed[numbers] + times.backward_fixed[numbers]
        return fixed, times.forward_per_byte[numbers] + times.backward_per_byte[numbers]

    def _at(self, rows: float) -> Times:
        """Of all redistributions that are known."""
        found = self._times.get(rows)
        done = 0 if found is None else len(found.forward_fixed)
        if found is None or done < len(self.known):
            more = self.known.since(done).times(self.links, rows)
            found = self._times[rows] = more if found is None else found.followed_by(more)
        return found

    def lowering(self, node: fx.Node, assignment: Assignment, ops: OpPrices, num_microbatches: int) -> OpTime:
        """Collectives inside a lowered op."""
        key = (node, assignment, num_microbatches)
        found = self._lowerings.get(key)
        if found is None:
            found = self._lowerings[key] = lowering_time(
                node,
                ops.workload.rule(node),
                assignment,
                self.fabric,
                batch_factor=ops.workload.roles.batch.get(node),
                num_microbatches=num_microbatches,
                precision=ops.workload.precision,
                balanced=ops.balanced,
                loads=ops.loads,
                compute=ops.time(node, assignment, self.mesh, num_microbatches),
            )
        return found

    def sync_rate(self, axes: tuple[int, ...], zero: int, precision: str) -> SyncTime:
        """Gradient synchronisation over ``axes`` jointly, per element and without latency."""
        key = (axes, zero, precision)
        found = self._rates.get(key)
        if found is None:
            one, two = (sync_time(self.fabric, n * _SAMPLE, axes, zero=zero, precision=precision) for n in (1, 2))
            found = self._rates[key] = (two + -1.0 * one) * (1 / _SAMPLE)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices of a configuration: a mesh, a number of microbatches, and ZeRO of level ``zero`` over ``data_axes``.

    data_axes: axes that divide the step inputs or have every parameter whole; what is whole on one is sharded there.
    Without ZeRO they mean nothing. prefetch: blocks that level 3 gathers ahead. levels, reshards: of the parameters of
    each kind of block, instead of ``zero`` and ``reshard``. offload: what ZeRO shards is in host memory. named: the
    mesh with the names of its axes, if those of ``moves`` are others.
    """

    ops: OpPrices
    moves: MeshPrices
    num_microbatches: int
    zero: int = 0
    data_axes: tuple[int, ...] = ()
    prefetch: int = 1
    reshard: bool = True
    levels: tuple[int, ...] | None = None
    reshards: tuple[bool, ...] | None = None
    offload: bool = False
    named: Mesh | None = None

    @property
    def workload(self) -> Workload:
        return self.ops.workload

    @property
    def mesh(self) -> Mesh:
        return self.named or self.moves.mesh

    @property
    def zero_degree(self) -> int:
        return self._size(self.data_axes) if self.zero else 1

    def _size(self, axes: Iterable[int]) -> int:
        return prod(self.mesh.axes[axis].size for axis in axes)

    def op(self, node: fx.Node, assignment: Assignment) -> OpTime:
        """One microbatch of one op, collectives of its lowering included."""
        time = self.ops.time(node, assignment, self.mesh, self.num_microbatches)
        return time + self.lowering(node, assignment)

    def lowering(self, node: fx.Node, assignment: Assignment) -> OpTime:
        """One microbatch of the collectives inside an op."""
        rule = self.workload.rule(node)
        if not any(choice in rule.lowered for choice in assignment):
            return ZERO
        return self.moves.lowering(node, assignment, self.ops, self.num_microbatches)

    def move(self, tensor: Tensor, source: Layout, value: Layout, grad: Layout) -> OpTime:
        """One microbatch of one redistribution."""
        if source == value and not tensor.differentiable:
            return ZERO
        rows = tensor.rows_of_microbatch(self.num_microbatches)
        affine = self.moves.move(source, value, grad, tensor.differentiable, rows)
        return ZERO if affine == NOTHING else affine.at(tensor.bytes_of_microbatch(self.num_microbatches))

    def feeding_s(self, choices: Assignment) -> float:
        """One microbatch of the step inputs, from the host. choices: of their cluster."""
        clusters, num_bytes = self.workload.clusters, 0.0
        for node in clusters.input_dims:
            value = node.meta["val"]
            pieces = self.pieces(tuple(clusters.input_placement(node, choice) for choice in choices))
            num_bytes += value.numel() * value.itemsize / pieces
        return self.ops.cluster.device.host.copy_seconds(num_bytes) / self.num_microbatches

    def local_bytes(self, tensor: Tensor, layout: Layout) -> float:
        """Bytes of a microbatch of ``tensor`` on one rank."""
        return tensor.bytes_of_microbatch(self.num_microbatches) / self.pieces(layout)

    def pieces(self, layout: Layout) -> int:
        """Into how many pieces ``layout`` cuts a tensor."""
        count = 1
        for placement, axis in zip(layout, self.mesh.axes, strict=True):
            if isinstance(placement, Shard):
                count *= axis.size
        return count

    def parameter(
        self, numel: int, requires_grad: bool, uses: Sequence[tuple[Layout, Layout]], kind: int | None = None
    ) -> ParameterPrice:
        """A parameter whose uses need these (value, gradient) layouts; the first one decides where it is stored.

        kind: of the block that alone uses it; None if several do.
        """
        layout = uses[0][0]
        zero = self.zero if kind is None or self.levels is None else self.levels[kind]
        reshard = self.reshard if kind is None or self.reshards is None else self.reshards[kind]
        zero_axes = tuple(axis for axis in self.data_axes if layout[axis].is_replicate()) if zero else ()
        shards = self._size(zero_axes)
        if shards == 1:
            zero_axes = ()
        partial = {
            axis
            for axis, placement in enumerate(layout)
            if placement.is_replicate()
            and requires_grad
            and any(value[axis].is_replicate() and grad[axis] == Partial() for value, grad in uses)
        }
        compute = ITEMSIZE[self.workload.precision]
        local = numel / self.pieces(layout)
        micro = ZERO
        for value, grad in uses[1:]:
            wanted = tuple(
                Replicate() if axis in partial and value[axis].is_replicate() else g for axis, g in enumerate(grad)
            )
            micro += self.moves.move(layout, value, wanted, requires_grad).at(numel * compute)
        masters = master_work(local, shards, zero=zero, itemsize=compute, num_microbatches=self.num_microbatches)
        device = self.ops.cluster.device
        cast = OpTime(*(device.memory_seconds(moved) for moved in masters))
        if not requires_grad:
            cast = OpTime(cast.forward_s, 0.0)
        if zero_axes:
            copies = buffer_copies(
                local, zero=zero, itemsize=compute, num_microbatches=self.num_microbatches, reshard=reshard
            )
            micro += OpTime(*(device.memory_seconds(moved) for moved in copies))
        return ParameterPrice(
            numel=local,
            requires_grad=requires_grad,
            sync_axes=tuple(sorted(partial - set(zero_axes))),
            zero_axes=zero_axes if requires_grad else (),
            micro=micro + cast,
            cast_s=cast.total_s,
            zero=zero,
            reshard=reshard,
            shards=shards,
        )

    def sync(self, price: ParameterPrice) -> SyncTime:
        """Communication of a parameter's gradient, and of the parameter under ZeRO, without latency.

        Latency is that of a bucket, not of a parameter; see ``bucket_sync``.
        """
        total = SyncTime()
        if price.zero_axes:
            total += price.numel * self.moves.sync_rate(price.zero_axes, price.zero, self.workload.precision)
        if price.sync_axes:
            share = price.numel / (price.shards if price.zero_axes else 1)
            total += share * self.moves.sync_rate(price.sync_axes, 0, self.workload.precision)
        return total

    def bucket_sync(self, prices: Sequence[ParameterPrice]) -> tuple[SyncTime, SyncTime]:
        """Communication of the parameters of one block, in one bucket for each set of axes: what can run beside
        compute, and what cannot."""
        sharded = by_level(prices)
        summed: dict[tuple[int, ...], float] = {}
        for price in prices:
            if price.sync_axes:
                share = price.numel / (price.shards if price.zero_axes else 1)
                summed[price.sync_axes] = summed.get(price.sync_axes, 0.0) + share
        beside = waited = SyncTime()
        precision, fabric = self.workload.precision, self.moves.fabric

        def add(found: SyncTime, axes: tuple[int, ...], zero: int) -> None:
            nonlocal beside, waited
            share = fabric.overlap(axes, zero)
            beside, waited = beside + share * found, waited + (1.0 - share) * found

        for (zero, reshard, axes), numel in sharded.items():
            found = sync_time(fabric, numel, axes, zero=zero, precision=precision, reshard=reshard)
            if self.offload:
                found += offload_time(numel / self._size(axes), self.ops.cluster.device, zero=zero, reshard=reshard)
            add(found, axes, zero)
        for axes, numel in summed.items():
            add(sync_time(fabric, numel, axes, precision=precision), axes, 0)
        return beside, waited

    def state(self, price: ParameterPrice, *, whole: bool = False) -> MemoryParts:
        """Parameter, gradient and optimiser bytes of one parameter. whole: without ZeRO."""
        count, precision = self.num_microbatches, self.workload.precision
        memory = state_memory(
            price.numel,
            zero=0 if whole else price.zero,
            data_size=price.shards,
            precision=precision,
            num_microbatches=count,
            reshard=price.reshard,
            offload=self.offload and bool(price.zero_axes),
        )
        return memory if price.requires_grad else MemoryParts(parameters=memory.parameters)

    def optimiser_s(self, price: ParameterPrice) -> float:
        """Seconds of the optimiser over one parameter, without the launch of its kernel."""
        if not price.requires_grad:
            return 0.0
        device = self.ops.cluster.device
        offload, numel = self.offload and bool(price.zero_axes), price.numel / price.shards
        return optimizer_time(numel, device, offload=offload) - optimizer_time(0.0, device, offload=offload)

    def zero_bytes(self, prices: Iterable[ParameterPrice]) -> tuple[float, float, float]:
        """What ZeRO has whole of the parameters of one block while it runs: parameters that are given back after it,
        gradients as computed, and the buffer that those leave from."""
        gathered = unsharded = scattered = 0.0
        compute = ITEMSIZE[self.workload.precision]
        for (zero, reshard, _), numel in by_level(prices).items():
            leaving = scattered_bytes(numel, zero=zero, num_microbatches=self.num_microbatches)
            gathered += gathered_bytes(numel, zero=zero, precision=self.workload.precision, reshard=reshard)
            scattered += leaving
            unsharded += compute * numel if leaving else 0.0
        return gathered, unsharded, scattered

    def lasting_bytes(self, price: ParameterPrice) -> float:
        """Of its gradient, if it is summed in a bucket, which stays from step to step."""
        size = MASTER * price.numel
        return size if price.sync_axes and not price.zero_axes and size < ALONE_BYTES else 0.0

    def resting(self, price: ParameterPrice) -> MemoryParts:
        """What is there of it after the last backward, with its gradient."""
        if self.offload and price.zero_axes:
            return MemoryParts()
        share = MASTER * price.numel / (price.shards if price.zero else 1)
        if not price.requires_grad:
            return MemoryParts(parameters=share)
        return MemoryParts(parameters=share, gradients=share, optimizer=2 * share)

    def optimiser_bytes(self, prices: Iterable[ParameterPrice]) -> float:
        """What AdamW computes on the way, of one parameter after the other: the root of its second moment, and that
        over its correction."""
        return 2 * max((self.resting(price).gradients for price in prices), default=0.0)


def by_level(prices: Iterable[ParameterPrice]) -> dict[tuple[int, bool, tuple[int, ...]], float]:
    """Elements that ZeRO shards, by level, whether they are given back after forward, and the axes."""
    found: dict[tuple[int, bool, tuple[int, ...]], float] = {}
    for price in prices:
        if price.zero_axes:
            key = (price.zero, price.reshard, price.zero_axes)
            found[key] = found.get(key, 0.0) + price.numel
    return found
