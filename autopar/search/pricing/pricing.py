"""Prices on one stage mesh: of an op, of a redistribution, of a parameter. Seconds and bytes of one rank.

The search and the prediction of a finished plan take all their prices from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from autopar.cost_model.communication.collectives import LOST_IN_LATENCY
from autopar.cost_model.communication.gradient_sync import (
    BucketSync,
    SyncTime,
    buffer_copies,
    hooks_time,
    master_work,
    narrow_work,
    offload_time,
    optimizer_time,
    sync_time,
    without_latency,
)
from autopar.cost_model.communication.redistribution_table import WHOLE, Shares
from autopar.cost_model.compute.casts import spared_by_gather
from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.compute.op_time import NOTHING, ZERO, OpTime
from autopar.cost_model.hardware.device import ITEMSIZE
from autopar.cost_model.memory.model_state import MemoryParts, gathered_bytes, scattered_bytes, state_memory
from autopar.cost_model.stacks.memory import StackMemory
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.placed.layouts import Need
from autopar.ir.placed.storage import stored, zero_divides
from autopar.ir.placement import Layout, Shard
from autopar.ir.primitives.read_parameter import ALONE_BYTES
from autopar.ir.redistribution import Collective
from autopar.ir.rule import Assignment
from autopar.search.pricing.parameter_price import MASTER as MASTER
from autopar.search.pricing.parameter_price import ParameterPrice, by_zero_stage
from autopar.search.pricing.placement_codes import decode_need
from autopar.search.pricing.price_cache import MeshPrices, OpPrices, ParameterSeconds
from autopar.search.problem.arrivals import Tensor, Transfer
from autopar.search.problem.kept_sets import KeptSets
from autopar.search.problem.workload import ParameterGroup, Workload

# Elements of a parameter whose price stands for those of others.
_SAMPLE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices of a configuration: a mesh, a number of microbatches, and ZeRO stage ``zero`` over ``data_axes``.

    data_axes: axes that divide the step inputs or have every parameter replicated; parameters replicated on one are
    sharded there. Without ZeRO they mean nothing. prefetch: blocks that stage 3 gathers ahead. zero_stages, reshards:
    of the parameters of each kind of block, instead of ``zero`` and ``reshard``. offload: where tensors that ZeRO
    shards are. named_mesh: the mesh with its axes' names, if those of ``moves`` differ. batches: of a
    step, that the captured batch makes. kept: what blocks may keep for their backward, beside the levels.
    """

    ops: OpPrices
    moves: MeshPrices
    num_microbatches: int
    zero: int = 0
    data_axes: tuple[int, ...] = ()
    prefetch: int = 1
    reshard: bool = True
    zero_stages: tuple[int, ...] | None = None
    reshards: tuple[bool, ...] | None = None
    offload: Offload = Offload.NONE
    named_mesh: Mesh | None = None
    batches: int = 1
    kept: tuple[KeptSets, ...] = ()

    @property
    def workload(self) -> Workload:
        """The workload that is priced."""
        return self.ops.workload

    @property
    def memory(self) -> StackMemory:
        """What the software stack of the cluster keeps in memory."""
        return self.ops.memory

    @property
    def mesh(self) -> Mesh:
        """The stage mesh."""
        return self.named_mesh or self.moves.mesh

    @property
    def parts(self) -> int:
        """Microbatches that the captured batch makes."""
        return self.batches * self.num_microbatches

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.workload.captured.batch_size // self.batches

    @property
    def num_tokens(self) -> float:
        """Tokens of a step."""
        return self.workload.num_tokens / self.batches

    @property
    def zero_degree(self) -> int:
        """Ranks over which ZeRO shards; 1 without ZeRO."""
        return self._size(self.data_axes) if self.zero else 1

    def _size(self, axes: Iterable[int]) -> int:
        return prod(self.mesh.axes[axis].size for axis in axes)

    def op(self, node: fx.Node, assignment: Assignment) -> OpTime:
        """One microbatch of one op, collectives of its lowering included."""
        time = self.ops.time(node, assignment, self.mesh, self.parts)
        return time + self.lowering(node, assignment) + -1.0 * self.spared(node, assignment)

    def spared(self, node: fx.Node, assignment: Assignment) -> OpTime:
        """Seconds of casts that the price of an op has, and that are not run as its weight is gathered in 8 bits."""
        group, kind = self.workload.narrow_products.get(node), None
        if group is None or not self.zero:
            return ZERO
        need = Need(*self.workload.rule(node).operand_layout(group.uses[0][1], assignment))
        if self.zero_stages is not None:
            kind = self.workload.repetition.blocks[group.blocks[0][0]].kind
        return self._spared(self.parameter(group.numel, group.requires_grad, [need], kind, narrow=True), group.reaches)

    def _spared(self, price: ParameterPrice, reaches: bool) -> OpTime:
        """reaches: whether the input of its product has a gradient."""
        compute, device = ITEMSIZE[self.workload.precision], self.ops.cluster.device
        if price.gathered == compute:
            return ZERO
        moved = spared_by_gather(device, SCALINGS["fp8-tensor"], compute, backward=reaches)
        return OpTime(*(device.memory_seconds(price.numel * own) for own in moved))

    def lowering(self, node: fx.Node, assignment: Assignment) -> OpTime:
        """One microbatch of the collectives inside an op."""
        rule = self.workload.rule(node)
        if not any(choice in rule.lowered for choice in assignment):
            return ZERO
        return self.moves.lowering(node, assignment, self.ops, self.parts)

    def delayed_share(self, node: fx.Node) -> float:
        """Share of the backward of an op that a split backward has in its weight-gradient pass."""
        share = self.workload.weights_share(node)
        at_once = self.memory.releases_early and share < 1.0 and not is_contraction(node, self.workload.rule(node))
        return 0.0 if at_once else share

    def shares(self, transfer: Transfer) -> Shares:
        """Of the bytes that gathers of a transfer move, those that are left where products by tensor read them."""
        if "activations" not in self.ops.cluster.device.stack.gathers_narrow:
            return WHOLE
        forward, backward = (1.0 / transfer.tensor.itemsize if narrow else 1.0 for narrow in transfer.narrow)
        return forward, backward

    def move(self, transfer: Transfer, source: Layout, value: Layout, grad: Layout) -> OpTime:
        """One microbatch of one redistribution."""
        tensor = transfer.tensor
        if source == value and not tensor.differentiable:
            return ZERO
        rows = tensor.rows_of_microbatch(self.parts)
        affine = self.moves.move(source, value, grad, tensor.differentiable, rows, self.shares(transfer))
        return ZERO if affine == NOTHING else affine.at(tensor.bytes_of_microbatch(self.parts))

    def feeding_s(self, choices: Assignment) -> float:
        """One microbatch of the step inputs, from the host. choices: of their cluster."""
        clusters, num_bytes = self.workload.clusters, 0.0
        for node in clusters.input_dims:
            value = node.meta["val"]
            pieces = self.pieces(tuple(clusters.input_placement(node, choice) for choice in choices))
            num_bytes += value.numel() * value.itemsize / pieces
        return self.ops.cluster.device.host.copy_seconds(num_bytes) / self.parts

    def local_bytes(self, tensor: Tensor, layout: Layout) -> float:
        """Bytes of a microbatch of ``tensor`` on one rank."""
        return tensor.bytes_of_microbatch(self.parts) / self.pieces(layout)

    def pieces(self, layout: Layout) -> int:
        """Number of pieces into which ``layout`` cuts a tensor."""
        count = 1
        for placement, axis in zip(layout, self.mesh.axes, strict=True):
            if isinstance(placement, Shard):
                count *= axis.size
        return count

    def parameter(
        self,
        numel: int,
        requires_grad: bool,
        uses: Sequence[Need],
        kind: int | None = None,
        itemsize: int = MASTER,
        *,
        narrow: bool = False,
    ) -> ParameterPrice:
        """A parameter whose uses need these (value, gradient) layouts; the first one decides where it is stored.

        kind: of the block that alone uses it; None if several do. itemsize: bytes of an element of the model's. narrow:
        whether ZeRO may gather it in 8 bits.
        """
        storage = stored(uses, len(self.mesh), trains=requires_grad)
        layout, partial = storage.layout, set(storage.partial_axes)
        zero = self.zero if kind is None or self.zero_stages is None else self.zero_stages[kind]
        reshard = self.reshard if kind is None or self.reshards is None else self.reshards[kind]
        # Without a gradient and its moments a parameter has no state that stages 1 and 2 would divide.
        divides = zero_divides(zero, requires_grad=requires_grad, shape=(numel,))
        zero_axes = tuple(axis for axis in self.data_axes if layout[axis].is_replicate()) if divides else ()
        shards = self._size(zero_axes)
        if shards == 1 and not self.offload:
            # Nothing is divided: the parameter costs as much as without ZeRO.
            zero_axes, zero = (), 0
        elif zero == 1 and self.num_microbatches == 1:
            # The only backward scatters each gradient as it is computed, as stage 2 does in every backward.
            zero = 2
        compute, device = ITEMSIZE[self.workload.precision], self.ops.cluster.device
        is_narrow = narrow and bool(zero_axes) and not self.offload and "weights" in device.stack.gathers_narrow
        gathered = 1 if is_narrow else compute
        local = numel / self.pieces(layout)
        micro = ZERO
        for need in uses[1:]:
            wanted = storage.wanted_gradient(need)
            micro += self.moves.move(layout, need.value, wanted, requires_grad).at(numel * compute)
        masters = master_work(
            local,
            shards,
            zero=zero,
            itemsize=compute,
            num_microbatches=self.num_microbatches,
            in_products=device.stack.adds_in_products,
        )
        cast = OpTime(*(device.memory_seconds(moved) for moved in masters))
        if not requires_grad:
            cast = OpTime(cast.forward_s, 0.0)
        if zero_axes:
            work: dict[str, Any] = {"zero": zero, "itemsize": compute, "num_microbatches": self.num_microbatches}
            copies = buffer_copies(local, gathered=gathered, reshard=reshard, **work)
            if not requires_grad:
                copies = copies[0], copies[0] if reshard else 0.0
            quantised = narrow_work(local, shards, reshard=reshard, **work) if is_narrow else (0.0, 0.0)
            micro += OpTime(*(device.memory_seconds(sum(moved)) for moved in zip(copies, quantised, strict=True)))
        return ParameterPrice(
            numel=local,
            requires_grad=requires_grad,
            sync_axes=tuple(sorted(partial - set(zero_axes))),
            zero_axes=zero_axes,
            micro=micro + cast,
            cast_s=cast.total_s,
            zero=zero,
            reshard=reshard,
            shards=shards,
            itemsize=MASTER if requires_grad else itemsize,
            gathered=gathered,
        )

    def parameter_seconds(self, group: ParameterGroup, uses: tuple[int, ...]) -> ParameterSeconds:
        """A parameter of a group under uses in codes, less what the price of its product has and is not run."""
        numel, requires_grad, narrow = group.numel, group.requires_grad, group.narrow
        # With a single use, all is in proportion to its elements.
        size = numel if len(uses) > 1 else _SAMPLE
        zero = (self.zero, self.data_axes, self.reshard, self.offload) if self.zero else ()
        key = (size, requires_grad, uses, self.num_microbatches, narrow, group.reaches, *zero)
        found = self.moves.parameters.get(key)
        if found is None:
            count = self.num_microbatches
            needs = [Need(*decode_need(use, len(self.mesh))) for use in uses]
            price = self.parameter(size, requires_grad, needs, narrow=narrow)
            spared_s = self._spared(price, group.reaches).total_s
            found = self.moves.parameters[key] = ParameterSeconds(
                micro_s=count * (price.micro.total_s - price.cast_s - spared_s),
                masters_s=count * price.cast_s + self.optimiser_s(price),
                sync_s=sum(own.total_s(count) for _, own in self.sync(price)),
                lost_s=sum(lost * own.total_s(count) for lost, own in self.sync(price)),
                state_bytes=self.state(price).total,
                numel=size,
            )
        return found

    def sync(self, price: ParameterPrice) -> list[tuple[float, SyncTime]]:
        """Communication of a parameter's gradient, and of the parameter under ZeRO, without latency, and what compute
        loses of each second of it that runs beside.

        Latency is that of a bucket, not of a parameter; see ``bucket_sync``.
        """
        found = []
        if price.zero_axes:
            rate = self.moves.sync_rate(
                price.zero_axes,
                price.zero,
                self.workload.precision,
                trains=price.requires_grad,
                gathered=price.gathered,
            )
            found.append((self.moves.fabric.lost(price.zero_axes), price.numel * rate))
        if price.sync_axes:
            share = price.numel / (price.shards if price.zero_axes else 1)
            rate = self.moves.sync_rate(price.sync_axes, 0, self.workload.precision)
            found.append((self.moves.fabric.lost(price.sync_axes), share * rate))
        return found

    def bucket_sync(self, prices: Sequence[ParameterPrice]) -> BucketSync:
        """Communication of the parameters of one block, in one bucket for each set of axes."""
        total = self.summed_sync(prices)
        device = self.ops.cluster.device
        for (zero, reshard, axes), own in by_zero_stage(prices).items():
            when: dict[str, Any] = {"zero": zero, "reshard": reshard, "trained": own.trained}
            bucket = self._bucket(axes, own.numel, gathered=own.gathered_bytes, **when)
            found = bucket(1.0)
            if self.offload:
                when |= {"offload": self.offload, "num_microbatches": self.num_microbatches}
                found += offload_time(own.numel / self._size(axes), device, **when)
            hooks = hooks_time(own.num_tensors, device, zero=zero, reshard=reshard)
            total += self._overlapped(found, without_latency(bucket), axes, zero) + BucketSync(waited=hooks)
        return total

    def maxima_s(self, prices: Iterable[ParameterPrice]) -> float:
        """Once a step: the largest magnitudes of what a stage gathers in 8 bits, over all of its ranks."""
        count = sum(bool(price.zero_axes) and price.gathered < ITEMSIZE[self.workload.precision] for price in prices)
        axes = tuple(range(len(self.mesh)))
        return self.moves.fabric.time(Collective.ALL_REDUCE, 4.0 * count, axes) if count else 0.0

    def summed_sync(self, prices: Sequence[ParameterPrice]) -> BucketSync:
        """The all-reduces of ``bucket_sync``, of which a part may need the core that computes (``Link.overlap``)."""
        summed: dict[tuple[int, ...], float] = {}
        for price in prices:
            if price.sync_axes:
                share = price.numel / (price.shards if price.zero_axes else 1)
                summed[price.sync_axes] = summed.get(price.sync_axes, 0.0) + share
        total = BucketSync()
        for axes, numel in summed.items():
            bucket = self._bucket(axes, numel)
            total += self._overlapped(bucket(1.0), without_latency(bucket), axes, 0)
        return total

    def _bucket(
        self, axes: tuple[int, ...], numel: float, *, gathered: float | None = None, **when: Any
    ) -> Callable[[float], SyncTime]:
        """The synchronisation of so many times as many elements. gathered, when: as of ``sync_time``."""
        fabric, precision = self.moves.fabric, self.workload.precision

        def times(more: float) -> SyncTime:
            own = None if gathered is None else more * gathered
            return sync_time(fabric, more * numel, axes, precision=precision, gathered=own, **when)

        return times

    def _overlapped(self, found: SyncTime, moving: SyncTime, axes: tuple[int, ...], zero: int) -> BucketSync:
        """A synchronisation, divided by what can run beside compute. moving: without latency, in which its
        kernels wait."""
        fabric = self.moves.fabric
        share = fabric.overlap(axes, zero)
        beside = share * found
        lost = share * (fabric.lost(axes) * moving + LOST_IN_LATENCY * (found + -1.0 * moving))
        return BucketSync(beside=beside, lost=lost, waited=found + -1.0 * beside)

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
            offload=self._is_off_device(price),
            itemsize=price.itemsize,
            stack=self.memory,
            reduced=bool(price.sync_axes or price.zero_axes),
            gathered=price.gathered,
        )
        return memory if price.requires_grad else MemoryParts(parameters=memory.parameters)

    def _is_off_device(self, price: ParameterPrice) -> bool:
        """Whether what ZeRO shards of a parameter takes no memory of the device."""
        return bool(price.zero_axes) and self.ops.cluster.device.is_left_by(self.offload)

    def optimiser_s(self, price: ParameterPrice) -> float:
        """Seconds of the optimiser over one parameter, without the launch of its kernel."""
        if not price.requires_grad:
            return 0.0
        device = self.ops.cluster.device
        offload, numel = self.offload if price.zero_axes else Offload.NONE, price.numel / price.shards
        return optimizer_time(numel, device, offload=offload) - optimizer_time(0.0, device, offload=offload)

    def zero_bytes(self, prices: Iterable[ParameterPrice]) -> tuple[float, float, float]:
        """Bytes that ZeRO holds unsharded of the parameters of one block while it runs: parameters that are
        resharded after it, gradients as computed, and the buffer that those are scattered from."""
        gathered = unsharded = scattered = 0.0
        compute = ITEMSIZE[self.workload.precision]
        for (zero, reshard, _), own in by_zero_stage(prices).items():
            leaving = 0.0
            if zero == 3 or not self.memory.lasting_gradients:
                leaving = scattered_bytes(own.numel * own.trained, zero=zero, num_microbatches=self.num_microbatches)
            gathered += gathered_bytes(own.gathered_bytes, zero=zero, reshard=reshard)
            scattered += leaving
            unsharded += compute * own.numel * own.trained if leaving else 0.0
        return gathered, unsharded, scattered

    def lasting_bytes(self, price: ParameterPrice) -> float:
        """Bytes of its gradient, if that is reduced in a bucket, which stays allocated from step to step, or the stack
        keeps all gradients so; else 0."""
        if self.memory.lasting_gradients and price.requires_grad and price.zero < 3:
            return self.state(price).gradients
        size = MASTER * price.numel
        return size if price.sync_axes and not price.zero_axes and size < ALONE_BYTES else 0.0

    def resting(self, price: ParameterPrice) -> MemoryParts:
        """Bytes held for a parameter after the last backward, its gradient included."""
        if self._is_off_device(price):
            return MemoryParts()
        if self.memory.lasting_gradients and price.zero < 3:
            return self.state(price)
        share = price.itemsize * price.numel / (price.shards if price.zero else 1)
        if not price.requires_grad:
            return MemoryParts(parameters=share)
        return MemoryParts(parameters=share, gradients=share, optimizer=2 * share)

    def optimiser_bytes(self, prices: Iterable[ParameterPrice]) -> float:
        """Workspace of AdamW, for one parameter after the other: the root of its second moment, and that over its
        correction. A stack with a buffer of gradients has an optimiser of one kernel, without any."""
        if self.memory.lasting_gradients:
            return 0.0
        return 2 * max((self.resting(price).gradients for price in prices), default=0.0)
