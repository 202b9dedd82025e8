"""Ring attention: queries, keys and values cut along the sequence; keys and values go round, queries stay.

    attention(q, k, v, kind='causal', scale=s)                                    q, k, v (b, h, s, d)
    ring_attention(q, k, v, kind='causal', scale=s, query_groups=('cp',), key_groups=('cp',), ..)

                                                                                  q, k, v (b, h, s / cp, d)

Forward (Liu, Zaharia and Abbeel, arXiv:2310.01889): each of N steps attends to the piece of keys and values at hand
while the next piece is on its way; N - 1 sends of one piece. Backward the pieces go round again, and behind them
their gradients, each sent on while the next piece is computed; at last they go home. Grouped heads travel once. Over
several axes the ring of the inner one goes round for each hop of the outer one.

Of packed documents a piece of queries and one of keys are computed document by document, and a step at which they have
none in common computes nothing. What is sent does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.ir.building import shape_of
from autopar.ir.graph import tensor_operands
from autopar.ir.lowered import blockwise
from autopar.ir.lowered.attention import QUERIES, attention_arguments, documents_of, lengths_of, sight_of
from autopar.ir.lowered.blockwise import Scores
from autopar.ir.lowered.inside import Inside, LocalSizes, Phase
from autopar.ir.lowered.shards import Groups, axes_with
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.ops.biased_attention import part_of
from autopar.ir.packed_order import PackedRows
from autopar.ir.primitives.collectives import all_gather, apply, communicates_backward
from autopar.ir.primitives.computed_once import computed_once
from autopar.ir.primitives.group_communication import group_at_hand, group_rank, group_size
from autopar.ir.primitives.values import has_values
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.sequence import Block, RingShape, Sight, Span, blocks, hops_needed, owner, spans
from autopar.ir.torch_private import never_compiled, process_group

Wait = Callable[[], Tensor]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    *,
    kind: composite.AttentionKind,
    window: int | None = None,
    scale: float,
    lengths: tuple[int, int],
    zigzag_ranks: int = 1,
    by_documents: bool = False,
    query_groups: Groups,
    key_groups: Groups,
) -> Tensor:
    """``composite.attention`` of this rank's queries to the keys of all ranks of ``key_groups``.

    q: (B, Hq, local S, D). k, v: (B, Hkv, local T, D). mask: rows of the local queries or one for all; columns of
        all keys, as they are stored, or one for all. Without rows of its own it has the columns of the local keys.
    documents: (B, T) or (1, T), of whole rows in natural order; of keys, a query sees those of its own document alone.
    lengths: queries and keys of all ranks together. zigzag_ranks: how the sequence is stored, see
    ``autopar.ir.sequence``;
        a piece of keys of several ranks in zigzag layout is put in natural order first. by_documents: each row is
        stored in the order of its documents for as many ranks (``autopar.ir.packed_order``).
    query_groups: groups that cut the queries, major first; key_groups: those of them that cut the keys too.
    """
    shape = RingShape(
        Sight(kind, window), lengths, zigzag_ranks, tuple(map(group_size, query_groups)),
        tuple(group in key_groups for group in query_groups), by_documents,
    )  # fmt: skip
    if documents is not None:
        packed: Tensor = _in_documents(q, k, v, mask, documents, shape, query_groups, key_groups, scale)
        return packed
    place = tuple(map(group_rank, query_groups))
    mask = _with_all_columns(mask, lengths, key_groups)
    if shape.reorders:
        own = shape.order_of_keys(shape.ring_place(place))
        k, v = (_put_in_order(x, own, 2) for x in (k, v))
        if mask is not None and mask.shape[-1] > 1:
            mask = _put_in_order(mask, shape.order_of_all_keys, 3)
    return cast(Tensor, apply(_Ring, q, k, v, mask, _Round(shape, place, key_groups, scale)))


@never_compiled
def _in_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    documents: Tensor,
    shape: RingShape,
    query_groups: Groups,
    key_groups: Groups,
    scale: float,
) -> Tensor:
    place = tuple(map(group_rank, query_groups))
    mask = _with_all_columns(mask, shape.lengths, key_groups)
    packed = None
    if has_values(documents):
        order = None if shape.by_documents else spans(shape.lengths[1], shape.zigzag_ranks)
        packed = PackedRows.of(documents, order, shape.zigzag_ranks)
        if shape.reorders:
            own = shape.stored_keys(shape.ring_place(place))
            k, v = (packed.in_natural_order(x, [own], 2) for x in (k, v))
            if mask is not None and mask.shape[-1] > 1:
                pieces = [shape.stored_keys(holder) for holder in product(*map(range, shape.ring_sizes))]
                mask = packed.in_natural_order(mask, pieces, 3)
    return cast(Tensor, apply(_Ring, q, k, v, mask, _Round(shape, place, key_groups, scale, packed)))


def _with_all_columns(mask: Tensor | None, lengths: tuple[int, int], key_groups: Groups) -> Tensor | None:
    """A mask without rows, which has the columns of the local keys, with those of all keys."""
    if mask is not None and mask.shape[-2] == 1 < mask.shape[-1] != lengths[1]:
        for group in reversed(key_groups):
            mask = all_gather(mask, dim=3, group=group, backward="reduce_scatter")
    return mask


def _put_in_order(x: Tensor, parts: tuple[Span, ...], dim: int) -> Tensor:
    """``x`` with its ``parts``, which are all of it, one after the other."""
    if len(parts) < 2:
        return x
    stored = sorted(parts)
    pieces = dict(zip(stored, x.split([len(part) for part in stored], dim), strict=True))
    return torch.cat([pieces[part] for part in parts], dim)


@dataclass(frozen=True, slots=True)
class _Round:
    """One rank's way round the ring."""

    shape: RingShape
    place: tuple[int, ...]
    groups: Groups
    scale: float
    packed: PackedRows | None = None

    @property
    def hops(self) -> tuple[int, ...]:
        return hops_needed(self.shape)

    def holder(self, step: int) -> tuple[int, ...]:
        """Ring place whose keys are at hand at a step."""
        return owner(self.shape.ring_place(self.place), self.shape.ring_sizes, self.hops[:step])

    def num_keys(self, step: int) -> int:
        return len(self.shape.stored_keys(self.holder(step)))

    def blocks(self, step: int) -> Iterator[tuple[slice, Block]]:
        """Blocks of scores at a step, each with the rows of the batch that it is of."""
        shape, holder = self.shape, self.holder(step)
        if self.packed is None:
            for block in blocks(shape.sight, shape.queries(self.place), shape.keys(holder)):
                yield slice(None), block
            return
        yield from self.packed.blocks(shape.sight, shape.stored_queries(self.place), shape.stored_keys(holder))

    def columns(self, mask: Tensor, step: int) -> Tensor:
        """The part of a mask that is about the keys at hand; a view."""
        return mask if mask.shape[-1] == 1 else mask[..., slice(*self.shape.stored_keys(self.holder(step)))]

    def to_next(self, buffer: Tensor, hop: int, numel: int) -> Wait:
        """Send a buffer along a hop; what comes has ``numel`` elements."""
        return _exchange(buffer, self.groups[self.hops[hop]], 1, numel)

    def home(self, buffer: Tensor, per_key: int) -> Tensor:
        """Send what belongs to the piece at hand to its owner; receive what belongs to the own piece."""
        own, holder = self.shape.ring_place(self.place), list(self.holder(len(self.hops)))
        for number, group in enumerate(self.groups):
            distance = -self.hops.count(number) % group_size(group)
            if distance:
                holder[number] = own[number]
                numel = per_key * len(self.shape.stored_keys(tuple(holder)))
                buffer = _exchange(buffer, group, distance, numel)()
        return buffer


def _exchange(buffer: Tensor, group: str, distance: int, numel: int) -> Wait:
    """Start to send ``buffer`` to the rank ``distance`` further in ``group``, and to receive from that far behind.

    The call that it returns waits for both and gives what came.
    """
    received = buffer.new_empty(numel)
    size, rank = group_size(group), group_rank(group)
    transport = process_group(group_at_hand(group))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, buffer, group=transport, group_peer=(rank + distance) % size),
            dist.P2POp(dist.irecv, received, group=transport, group_peer=(rank - distance) % size),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def _numel_per_key(k: Tensor, v: Tensor) -> int:
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """One buffer for one send."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(buffer: Tensor, k: Tensor, v: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Views of keys and values of a piece of ``num_keys``, shaped as ``k`` and ``v`` otherwise."""
    shapes = [(*x.shape[:2], num_keys, x.shape[3]) for x in (k, v)]
    sizes = [prod(shape) for shape in shapes]
    keys, values = buffer.split(sizes)
    return keys.view(shapes[0]), values.view(shapes[1])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: _Round) -> Tensor:
        ctx.way = way
        communicates_backward(ctx)
        if not has_values(q):
            ctx.save_for_backward(q, k, v, mask, None, None)
            return q.new_empty((*q.shape[:3], v.shape[3]))
        out, lse = computed_once(lambda: _attend(q, k, v, mask, way))
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        wants_mask = ctx.needs_input_grad[3]
        if not has_values(q):
            return *map(torch.empty_like, (q, k, v)), torch.empty_like(mask) if wants_mask else None, None
        grad_mask = torch.zeros_like(mask, dtype=blockwise.wide_dtype(q)) if wants_mask else None
        dq, dk, dv = _gradients(grad, q, k, v, mask, out, lse, ctx.way, grad_mask)
        return (
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            None if grad_mask is None else grad_mask.to(mask.dtype),
            None,
        )


def _pieces(k: Tensor, v: Tensor, way: _Round) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values at each step, while the next ones are on their way."""
    if not way.hops:
        yield k, v
        return
    buffer, per_key = _pack(k, v), _numel_per_key(k, v)
    for step in range(len(way.hops)):
        coming = way.to_next(buffer, step, per_key * way.num_keys(step + 1))
        yield _unpack(buffer, k, v, way.num_keys(step))
        buffer = coming()
    yield _unpack(buffer, k, v, way.num_keys(len(way.hops)))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: _Round) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp (wide) of the local queries over all keys."""
    wide = blockwise.wide_dtype(q)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
    for step, (keys, values) in enumerate(_pieces(k, v, way)):
        columns = None if mask is None else way.columns(mask, step)
        for rows, block in way.blocks(step):
            row, column = _slices(block)
            part = None if columns is None else _part_of(columns, rows, block)
            more = blockwise.forward(
                q[rows, :, row], keys[rows, :, column], values[rows, :, column], part,
                Scores(way.scale, way.shape.sight, block),
            )  # fmt: skip
            blockwise.merge(out[rows, :, row], lse[rows, :, row], *more)
    return out.to(q.dtype), lse


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    way: _Round,
    grad_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (wide) of the local queries, keys and values; that of the mask is added to ``grad_mask``."""
    wide = blockwise.wide_dtype(q)
    dq = torch.zeros_like(q, dtype=wide)
    per_key = _numel_per_key(k, v)
    sums: Wait | None = None
    for step, (keys, values) in enumerate(_pieces(k, v, way)):
        num_keys = way.num_keys(step)
        own = k.new_zeros(per_key * num_keys, dtype=wide)
        dk, dv = _unpack(own, k, v, num_keys)
        columns = None if mask is None else way.columns(mask, step)
        mask_columns = None if grad_mask is None else way.columns(grad_mask, step)
        for rows, block in way.blocks(step):
            row, column = _slices(block)
            part, grad_part = (None if x is None else _part_of(x, rows, block) for x in (columns, mask_columns))
            more_q, more_k, more_v = blockwise.backward(
                grad[rows, :, row], q[rows, :, row], keys[rows, :, column], values[rows, :, column], part,
                out[rows, :, row], lse[rows, :, row], Scores(way.scale, way.shape.sight, block), grad_part,
            )  # fmt: skip
            dq[rows, :, row] += more_q
            dk[rows, :, column] += more_k
            dv[rows, :, column] += more_v
        if sums is not None:
            own += sums()
        if step < len(way.hops):
            sums = way.to_next(own, step, per_key * way.num_keys(step + 1))
    own = way.home(own, per_key)
    return dq, *_unpack(own, k, v, way.num_keys(0))


def _part_of(mask: Tensor, rows: slice, block: Block) -> Tensor:
    """The part of a mask that is about a block of some rows of the batch."""
    return part_of(mask[rows] if mask.shape[0] > 1 else mask, slice(*block.rows), slice(*block.columns))


def _slices(block: Block) -> tuple[slice, slice]:
    return slice(*block.rows), slice(*block.columns)


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces an attention whose keys are cut where its queries are."""
    operands, kwargs = attention_arguments(node)
    del kwargs["dropout_p"]
    kwargs["documents"] = documents_of(node)
    groups = kwargs["query_groups"], kwargs["key_groups"] = _axes(rule, assignment, mesh)
    kwargs["lengths"] = tuple(
        shape_of(operand)[-2] * prod(mesh.axes[mesh.index(name)].size for name in cut)
        for operand, cut in zip(operands[:2], groups, strict=True)
    )
    return ring_attention, operands, kwargs


def _axes(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Groups, Groups]:
    """Those that cut the queries, and those that cut the keys."""
    return axes_with({QUERIES}, assignment, mesh), axes_with(set(rule.operands[1][-2]), assignment, mesh)


def inside(node: fx.Node, rule: FactorRule, sizes: LocalSizes) -> Iterator[Inside]:
    """Keys and values from rank to rank, forward and backward; backward their gradients behind them, and home."""
    queries, keys = _axes(rule, sizes.assignment, sizes.mesh)
    operands, lengths = [operand.meta["val"] for operand in tensor_operands(node)], lengths_of(rule)
    shape = RingShape(
        sight_of(node), lengths, sizes.zigzag_ranks, tuple(map(sizes.size, queries)),
        tuple(axis in keys for axis in queries), sizes.by_documents,
    )  # fmt: skip
    hops, sent = hops_needed(shape), sum(operands[p].numel() * sizes.share(rule.operands[p]) for p in (1, 2))
    pieces = sent * sizes.itemsize(operands[1].dtype)
    gradients = sent * max(4, operands[1].dtype.itemsize)
    phases: tuple[Phase, ...] = ("forward", "backward") if any(map(sizes.flows, (0, 1, 2))) else ("forward",)
    for phase in phases:
        for hop in hops:
            yield Inside("send", phase, (keys[hop],), pieces)
            if phase == "backward":
                yield Inside("send", phase, (keys[hop],), gradients)
    for number, axis in enumerate(keys if len(phases) > 1 else ()):
        if hops.count(number) % sizes.size(axis):
            yield Inside("send", "backward", (axis,), gradients)
    if (
        attention_arguments(node)[0][3] is not None
        and operands[3].shape[-2] == 1 < operands[3].shape[-1]
        and rule.operands[3][-1]
    ):
        mask = operands[3].numel() * sizes.share(rule.operands[3]) * sizes.itemsize(operands[3].dtype)
        for axis in reversed(keys):
            mask *= sizes.size(axis)
            yield Inside("all_gather", "forward", (axis,), mask)
            if sizes.flows(3):
                yield Inside("reduce_scatter", "backward", (axis,), mask)
