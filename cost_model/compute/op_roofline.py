"""Roofline of one op on one rank, forward and backward.

    forward  = max(FLOPs / achieved FLOP/s, bytes / achieved bandwidth, elements * function) + launches
    backward = the same over what the gradient computation does

What a matrix product achieves depends on its local shape (``matmul_efficiency``), of each product of the backward on
its own; on a core its bytes add to it. Of a recurrent layer, the products of the steps come one after another. Experts
are two products for each of them, of the rows that it gets on average; where ranks share experts the time is that of
the rank with most rows, as far as it is known how many each expert gets.
FLOPs and bytes are those of the local shard: the rule's FLOPs divided by the ranks that share the work, each
tensor divided by the axes that cut it, and both by the number of microbatches where they carry the batch. Where
ranks share the queries of a causal attention, the time is that of the rank that sees the most keys.

The backward of a contraction (``flops.py``) is one such product for each operand that needs a gradient. Every other
op is bound by the bytes it reads and writes (``traffic.py``), backward the gradients and what it saved. A view costs
nothing forward; backward it fills the gradient of what it left out. An addition passes its gradient
through to its operands, a concatenation slices of it. Autograd accumulates the gradients of a tensor with several uses:
a kernel for each use but the first. Nothing else is free.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod

from torch import fx

from autopar.cost_model.compute.beside_memory import BesideMemory
from autopar.cost_model.compute.casts import (
    Casts,
    casts_of_experts,
    casts_of_product,
    launches_of_product,
    slowdown_of_gradients,
)
from autopar.cost_model.compute.documents import (
    Documents,
    in_one_call,
    keeps_documents_apart,
    scores_counted,
)
from autopar.cost_model.compute.expert_imbalance import Loads, share_of_busiest
from autopar.cost_model.compute.expert_kernels import AROUND_EXPERTS, BetweenProducts, launches_of_expert
from autopar.cost_model.compute.flops import (
    accumulated_gradients,
    contracted_operands,
    forward_flops,
    gradient_passes,
    gradients_passed_through,
    op_name,
    wanted_gradients,
)
from autopar.cost_model.compute.fusion import Fused, made_by_norm
from autopar.cost_model.compute.local_products import (
    ITSELF,
    OF_WEIGHTS,
    Product,
    gradient_orders,
    launches_of_recurrence,
    product_of,
    products_of_experts,
    products_of_recurrence,
)
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.compute.scans import is_scan, launches_of_scan
from autopar.cost_model.compute.traffic import (
    PASSES_OF_ADDITION,
    WORK,
    Function,
    MovedTensor,
    degrees_of,
    extra_passes,
    function_time,
    moved_tensor,
    passes_beside,
)
from autopar.cost_model.hardware.device import Device, MatmulRate
from autopar.cost_model.hardware.matmul_efficiency import fraction_of_rate
from autopar.ir.analysis.views import is_view
from autopar.ir.errors import UnsupportedOp
from autopar.ir.graph import has_gradient_dtype, tensor_operands, tensor_results
from autopar.ir.lowered.attention import QUERIES, is_attention, lengths_of, sight_of
from autopar.ir.mesh import Mesh
from autopar.ir.ops.op_recipes import scaling_of
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.rules import recurrent
from autopar.ir.rules.moe import EXPERTS
from autopar.ir.rules.saved import saved_for_backward
from autopar.ir.sequence import Sight, imbalance, zigzag_ranks_for

# Fused attention computes the scores again in its backward: one more product, of the forward's two.
_RECOMPUTED_SCORES = 0.5

# Bytes of a float32 gradient that is read and written.
_ADDED = 8.0

# Ops whose first operand is a table of which they read only what they return.
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "index.Tensor"})

# Launches of a composite op on a core, forward and backward, where there is no kernel for all of it.
_LAUNCHES_ON_CPU = {"rms_norm": (6, 9)}


@dataclass(frozen=True, slots=True)
class OpCost:
    """Everything about an op that its time depends on, so that each assignment takes microseconds.

    read, written: tensors that forward reads and writes; backward_read, backward_written: the same of backward.
    products: of matrices, () for an op that is none and no mixture of experts; gradients: for each of them the products
    that give those of its operands. joint: choices that send rows to their experts. launches: of kernels forward and
    backward, beside those of_an_expert that are its own.
    is_contraction: selective rematerialisation keeps the results of these (matmuls, convolutions, attention).
    accumulated_in_place, accumulated_out_of_place: operands with an earlier use, whose gradients autograd accumulates,
    in a gradient or in a new tensor.
    function: that is taken of elements of the first operand.
    sight, lengths: of an attention, who sees whom and how many queries and keys there are. balanced: whether its
    sequence is in zigzag layout so that all ranks see equally many keys. loads: tokens per expert, by layer.
    casts, casts_back: what turns operands of a product into narrow floats reads and writes, forward and backward,
    before it. Gradients of experts in narrow floats take ``slowdown`` times as long as if all of them were. documents:
    of an attention that runs document by document, those of a row; ``flops`` are as many as take so long at the
    efficiency of whole rows. between: the products of experts. beside: what a norm or an attention takes beside its
    memory or its kernel. added: float32 gradients of weights, read and written by the products that add to them.
    """

    name: str
    device: Device
    rate: MatmulRate
    free: bool
    free_backward: bool
    flops: float
    backward_flops: float
    carries_batch: bool
    read: tuple[MovedTensor, ...]
    written: tuple[MovedTensor, ...]
    backward_read: tuple[MovedTensor, ...]
    backward_written: tuple[MovedTensor, ...]
    products: tuple[Product, ...]
    gradients: tuple[tuple[int, ...], ...]
    joint: frozenset[str]
    is_contraction: bool
    sizes: dict[str, int]
    batch_factor: str | None
    efficiency: float
    launches: tuple[int, int]
    of_an_expert: tuple[int, int] = (0, 0)
    slowdown: float = 1.0
    accumulated_in_place: tuple[MovedTensor, ...] = ()
    accumulated_out_of_place: tuple[MovedTensor, ...] = ()
    function: Function | None = None
    sight: Sight | None = None
    lengths: tuple[int, int] = (1, 1)
    balanced: bool = False
    loads: Loads = ()
    documents: Documents | None = None
    between: BetweenProducts | None = None
    beside: BesideMemory | None = None
    casts: tuple[MovedTensor, ...] = ()
    casts_back: tuple[MovedTensor, ...] = ()
    added: tuple[MovedTensor, ...] = ()

    @classmethod
    def of(
        cls,
        node: fx.Node,
        rule: FactorRule | None,
        device: Device,
        *,
        precision: str = "fp32",
        batch_factor: str | None = None,
        needs_grad: AbstractSet[fx.Node] | None = None,
        balanced: bool = False,
        loads: Loads = (),
        documents: Documents | None = None,
        fused: Fused | None = None,
        cast_before: bool = False,
    ) -> OpCost:
        """Measure ``node``.

        precision: of compute (fp32, bf16 or fp16): what float32 tensors of the capture become. batch_factor: the
        factor of the rule that is the batch, None if the op does not carry it. needs_grad: tensors that a
        gradient flows through (``ir.gradient_flow``), the op among them; every floating point one if not given.
        documents: in the rows of an attention that keeps them apart; one whole row if not given. fused: in which
        kernel the op is, if in one with others. cast_before: whether another product has its input in the same
        narrow floats.
        Raises UnsupportedOp for an op without a rule.
        """
        if rule is None:
            raise UnsupportedOp(
                f"no cost for {node.target} ({node.name}): it has no factor rule"
                f"\n  at: {node.meta.get('source', 'unknown line')}"
            )
        operands, results = tensor_operands(node), tensor_results(node)
        read = [
            moved_tensor(o.meta["val"], f, precision, batch_factor)
            for o, f in zip(operands, rule.operands, strict=True)
        ]
        written = [moved_tensor(r, f, precision, batch_factor) for r, f in zip(results, rule.results, strict=True)]
        differentiable = wanted_gradients(node, needs_grad)
        moved = fused or Fused.alone(len(operands), len(results))
        flowing = [written[number] for number in sorted(moved.written) if has_gradient_dtype(results[number])]
        passed_through = gradients_passed_through(node, differentiable) if flowing else []
        gradients = [read[p] for p in differentiable if p not in passed_through and p in moved.read]
        in_place, out_of_place = (
            tuple(read[p] for p in accumulated_gradients(node, needs_grad, in_place=own) if p in moved.read)
            for own in (True, False)
        )
        contracted = contracted_operands(node, rule)
        attention = is_attention(node)
        free = is_view(node)
        if op_name(node) in _LOOKUPS and read:
            read[0] = written[0]
        elif op_name(node) == "embedding_bag":
            rows = operands[1].meta["val"].numel() / max(results[0].shape[0], 1)
            read[0] = replace(written[0], num_bytes=rows * written[0].num_bytes)
        forward_extra, backward_extra = extra_passes(node, rule, device, precision, batch_factor)
        rotated, rotated_back = passes_beside(node, rule, device, precision, batch_factor)
        flops = forward_flops(rule, contracted)
        experts, scaling = op_name(node) == "moe", scaling_of(node)
        rate = device.matmul_rate(precision if scaling is None else scaling.rate)
        passes = gradient_passes(node, contracted, differentiable)
        if attention and passes:
            passes += _RECOMPUTED_SCORES
        in_steps = recurrent.is_recurrent(node)
        if in_steps:
            products = products_of_recurrence(node, rule)
        else:
            products = (
                products_of_experts(rule) if experts else () if attention else product_of(rule, contracted, flops)
            )
        of_an_expert = launches_of_expert(node, device, precision, scaling) if experts else (0, 0)
        launches = (1, max(1, len(gradients)) if contracted else 1)
        if in_steps or is_scan(node):
            launches = launches_of_scan(node) if is_scan(node) else launches_of_recurrence(node)
        casts: Casts = ((), ())
        slowdown = 1.0
        if scaling is not None and experts:
            itemsize, batched = written[0].itemsize, batch_factor is not None
            casts = casts_of_experts(node, read[3:5], differentiable, device, scaling, itemsize, carries_batch=batched)
            slowdown = slowdown_of_gradients(scaling, rate, device.matmul_rate(precision))
        elif scaling is not None:
            casts = casts_of_product(
                read, written[0], differentiable, device, scaling, shared=cast_before, by_norm=made_by_norm(operands[0])
            )
            launches = launches_of_product(launches, casts)
        if device.is_cpu:
            launches = _LAUNCHES_ON_CPU.get(op_name(node), launches)
        sight = sight_of(node) if attention and QUERIES in rule.sizes else None
        queries, keys = lengths_of(rule) if sight is not None else (1, 1)
        share = share_back = 1.0
        rates = rate.attention_efficiency, rate.attention_efficiency
        if sight is not None:
            head = operands[0].meta["val"].shape[-1]
            rates = rate.attention_rates(keys, head, causal=sight.is_causal, window=sight.reach[0])
        if sight is None or not keeps_documents_apart(node):
            documents = None
        elif documents is not None:
            counted = scores_counted(sight, queries, keys)
            share, share_back = (
                work * own / counted for work, own in zip(documents.work(sight, rate, head), rates, strict=True)
            )
            documents = None if in_one_call(node, device, precision) else documents
        saved_tensors = [*read, *backward_extra]
        if not (contracted or backward_extra or in_steps):
            saved = saved_for_backward(node, None if needs_grad is None else needs_grad.__contains__, precision)
            saved_tensors = [read[position] for position in saved.operands if position in moved.read]
            saved_tensors += [written[number] for number in saved.results if number in moved.written]
            if saved.extra_bytes:
                saved_tensors.append(replace(written[0], num_bytes=saved.extra_bytes))
        same_size = all(t.num_bytes == g.num_bytes for t in flowing for g in gradients) and len(flowing) == 1
        # The backward of a slice fills the gradient of the whole tensor with zeros and copies the slice's into it.
        filled = free and sum(t.num_bytes for t in flowing) < sum(g.num_bytes for g in gradients)
        if filled:
            launches = (1, 2)
        if fused is not None:
            free, launches = False, (int(fused.leads), int(fused.leads and bool(differentiable)))
        return cls(
            name=op_name(node),
            device=device,
            rate=rate,
            free=free,
            free_backward=not differentiable
            if fused is not None
            else not gradients or not flowing or (free and same_size),
            flops=share * flops,
            backward_flops=share_back * flops * passes * (rates[0] / rates[1] if attention else 1.0),
            carries_batch=batch_factor is not None,
            read=(*(read[position] for position in sorted(moved.read)), *forward_extra, *rotated),
            written=tuple(written[number] for number in sorted(moved.written)),
            backward_read=(*flowing, *(() if free else saved_tensors), *rotated_back),
            backward_written=(*gradients, *flowing) if filled else tuple(gradients),
            products=products,
            gradients=gradient_orders(contracted, differentiable) if products else (),
            joint=frozenset(rule.joint),
            is_contraction=bool(contracted),
            sizes=dict(rule.sizes),
            batch_factor=batch_factor,
            efficiency=rates[0] if attention else rate.efficiency * (device.grouped if experts else 1.0),
            launches=AROUND_EXPERTS if experts else launches,
            of_an_expert=of_an_expert,
            slowdown=slowdown,
            accumulated_in_place=in_place,
            accumulated_out_of_place=out_of_place,
            function=Function.of(node, rule, batch_factor),
            sight=sight,
            lengths=(queries, keys),
            balanced=balanced,
            loads=loads,
            documents=documents,
            between=BetweenProducts.of(node, precision, batch_factor, device, scaled=scaling is not None)
            if experts
            else None,
            beside=BesideMemory.of(node, rule, device, precision, batch_factor, differentiable, documents),
            casts=casts[0],
            casts_back=casts[1],
            added=tuple(
                replace(read[p], num_bytes=read[p].num_bytes / read[p].itemsize * _ADDED)
                for p in differentiable
                if device.stack.adds_in_products and p in contracted and p and not read[p].carries_batch
            ),
        )

    def time(self, assignment: Assignment, mesh: Mesh, num_microbatches: int = 1) -> OpTime:
        """Seconds of one microbatch on one rank. Never negative; positive unless the op is a view."""
        degrees = degrees_of(assignment, mesh)
        sent = prod(axis.size for choice, axis in zip(assignment, mesh.axes, strict=True) if choice in self.joint)
        work = degrees[WORK] * (num_microbatches if self.carries_batch else 1)
        own_experts = self.sizes.get(EXPERTS, 0) / degrees.get(EXPERTS, 1)
        launch, launch_back = (
            self.device.kernel_launch_s * (around + own_experts * own)
            for around, own in zip(self.launches, self.of_an_expert, strict=True)
        )
        most = self._largest_share(degrees)
        busy = most / work / (self.rate.peak_flops * self.efficiency)
        computing, computing_back = self.flops * busy, self.backward_flops * busy
        if self.products:
            computing = computing_back = 0.0
            for product in self.products:
                shape = product.local_shape(self.sizes, degrees, self.batch_factor, num_microbatches, sent)
                steps = product.steps
                computing += product.flops * busy / self._fraction(shape, ITSELF, steps)
                for order in self.gradients:
                    of_order = product.flops * busy / self._fraction(shape, order, steps)
                    if order == OF_WEIGHTS and num_microbatches > 1:
                        added = sum(tensor.local(degrees, num_microbatches) for tensor in self.added)
                        of_order = max(of_order, self.device.memory_seconds(added * product.flops / self.flops))
                    computing_back += of_order
            computing_back *= self.slowdown
        forward = backward = 0.0
        taken, taken_back = function_time(self.function, self.device, degrees, num_microbatches)
        beside = self._by_document(degrees, num_microbatches)
        if self.beside is not None:
            beside += self.beside.time(degrees, num_microbatches)
        if self.between is not None:
            beside += self.between.time(self.device, degrees, num_microbatches, most)
        if not self.free:
            moved = self._moved((*self.read, *self.written), degrees, num_microbatches, most)
            forward = self._together(computing, self.device.kernel_seconds(moved), taken) + launch + beside.forward_s
            forward += self.device.memory_seconds(self._moved(self.casts, degrees, num_microbatches, 1.0))
        if not self.free_backward:
            tensors = (*self.backward_read, *self.backward_written)
            moved = self._moved(tensors, degrees, num_microbatches, most)
            backward = (
                self._together(computing_back, self.device.kernel_seconds(moved), taken_back)
                + launch_back
                + beside.backward_s
                + self.device.memory_seconds(self._moved(self.casts_back, degrees, num_microbatches, 1.0))
            )
        for tensors, seconds in (
            (self.accumulated_in_place, self.device.optimizer_seconds),
            (self.accumulated_out_of_place, self.device.kernel_seconds),
        ):
            for tensor in tensors:
                moved = PASSES_OF_ADDITION * tensor.local(degrees, num_microbatches)
                backward += seconds(moved) + self.device.kernel_launch_s
        return OpTime(forward, backward)

    def _by_document(self, degrees: dict[str, int], num_microbatches: int) -> OpTime:
        """Of what runs once for each document beside its attention."""
        if self.documents is None:
            return ZERO
        factor = self.batch_factor
        rows = 1.0 if factor is None else self.sizes[factor] / degrees.get(factor, 1) / num_microbatches
        copied = (self._moved(tensors, degrees, num_microbatches, 1.0) for tensors in (self.written, self.read[:3]))
        return self.documents.beside(self.device, rows, *copied)

    def written_bytes(self, assignment: Assignment, mesh: Mesh, num_microbatches: int) -> float:
        """Bytes of the results of one microbatch on one rank."""
        degrees = degrees_of(assignment, mesh)
        return sum(t.local(degrees, num_microbatches) for t in self.written)

    def beside_products_s(self, assignment: Assignment, mesh: Mesh, num_microbatches: int) -> float:
        """Seconds of the forward of experts whose products are there already; 0 of other ops."""
        if self.between is None:
            return 0.0
        degrees = degrees_of(assignment, mesh)
        between = self.between.time(self.device, degrees, num_microbatches, self._largest_share(degrees))
        return self.launches[0] * self.device.kernel_launch_s + between.forward_s

    def kernels_of_experts(self, assignment: Assignment, mesh: Mesh) -> float:
        """Kernels in the forward of the experts of a rank, each for one of them; 0 of other ops."""
        return self.of_an_expert[0] * self.sizes.get(EXPERTS, 0) / degrees_of(assignment, mesh).get(EXPERTS, 1)

    def _largest_share(self, degrees: dict[str, int]) -> float:
        """Work of the rank that has most, over the mean."""
        if EXPERTS in self.sizes:
            return share_of_busiest(self.loads, self.sizes[EXPERTS], degrees.get(EXPERTS, 1))
        count = degrees.get(QUERIES, 1)
        if self.sight is None or count == 1:
            return 1.0
        zigzag_ranks = zigzag_ranks_for(self.lengths, count, balanced=self.balanced)
        return imbalance(self.sight, self.lengths, zigzag_ranks, count)

    def _moved(
        self, tensors: tuple[MovedTensor, ...], degrees: dict[str, int], num_microbatches: int, most: float
    ) -> float:
        """Bytes of a microbatch on the rank that has most to do."""
        return sum(t.local(degrees, num_microbatches) * (most if WORK in t.factors else 1.0) for t in tensors)

    def _together(self, computing: float, moving: float, functions: float) -> float:
        if self.is_contraction and self.device.is_cpu:
            return computing + moving
        return max(computing, moving, functions)

    def _fraction(self, shape: tuple[float, ...], order: tuple[int, ...], steps: int) -> float:
        rows, *others = (shape[number] for number in order)
        return fraction_of_rate(self.device.tiling, rows / steps if order[0] == 0 else rows, *others)


def op_time(
    node: fx.Node,
    rule: FactorRule | None,
    assignment: Assignment,
    mesh: Mesh,
    device: Device,
    *,
    precision: str = "fp32",
    batch_factor: str | None = None,
    num_microbatches: int = 1,
    needs_grad: AbstractSet[fx.Node] | None = None,
) -> OpTime:
    """Seconds of one microbatch of one op on one rank. ``OpCost`` is the form for many assignments."""
    cost = OpCost.of(node, rule, device, precision=precision, batch_factor=batch_factor, needs_grad=needs_grad)
    return cost.time(assignment, mesh, num_microbatches)
