"""Experts divided among ranks: each rank computes those that it has.

    moe(x, index, weight, w_up, w_down)                                    w_up (E, u, h), w_down (E, h, i)
    moe(.., expert_groups=('tp',), dispatched=(False,))                    w_up (E / tp, u, h): a summand over tp
    moe(.., expert_groups=('ep',), dispatched=(True,),                     x (b / ep, ..): rows travel to their experts
            dispatch_groups=('ep',))
    moe(.., expert_groups=('ep', 'tp'), dispatched=(True, True),           x (b / ep, s / tp, ..): over both at once
            dispatch_groups=('ep,tp',))
    moe(.., capacity_factor=1.25, token_groups=('dp', 'ep'))               rows beyond what an expert takes are dropped

A row is a token on its way to one of its K experts. Where the ranks of an axis have the same tokens, each keeps the
rows for its own experts, and the results are summands. Where they have different tokens the tokens are dispatched: an
all_gather of how many go to each expert, an all_to_all of exactly these rows, the experts, and an all_to_all back.
Nothing is padded; a rank may receive nothing. Backward, the gradients take the same two ways in reverse. Experts that
are spread over several axes get their rows in one all_to_all over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.inside import Inside, LocalSizes, Phase
from autopar.ir.lowered.shards import Groups, arguments, axes_with, shard_count, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.ops.expert_ffn import (
    Experts,
    capacity_of,
    combine,
    first_of_experts,
    record_load,
    rows_of_experts,
    run_experts,
)
from autopar.ir.ops.scalings import SCALINGS, Recipe
from autopar.ir.primitives.collectives import apply, communicates_backward
from autopar.ir.primitives.group_communication import (
    group_all_gather_stacked,
    group_all_to_all_rows,
    group_rank,
    group_size,
    joint_groups,
)
from autopar.ir.primitives.values import has_values
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.rules.moe import EXPERTS

Counts = tuple[int, ...]
_COUNT_BYTES = 8
_MAXIMUM_BYTES = 4


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Counts, received: Counts, group: str) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        communicates_backward(ctx)
        return group_all_to_all_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return group_all_to_all_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def moe(
    x: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str,
    gated: bool,
    interleaved: bool = False,
    capacity_factor: float | None = None,
    expert_groups: Groups = (),
    dispatched: tuple[bool, ...] = (),
    dispatch_groups: Groups = (),
    inner_groups: Groups = (),
    token_groups: Groups = (),
    recipe: Recipe | None = None,
    row_groups: Groups = (),
) -> Tensor:
    """``composite.moe`` on this rank's tokens and experts; a summand over groups that it does not dispatch over.

    x: (.., h), expert_index, expert_weight: (.., K): this rank's tokens; the indices are global. w_up and the
    other parameters: this rank's experts, the first of ``expert_groups`` being the major axis. dispatched: for each
    of them, whether its ranks have different tokens; dispatch_groups: one group over all those axes, none without any.
    inner_groups: these cut the inner width, and divide a bias on the way out among them. token_groups: these cut the
    first token dimension; a capacity counts the tokens of all. row_groups: these have other rows of this rank's
    experts, and by a recipe share their scales.
    """
    if b_down is not None and inner_groups:
        b_down = b_down / shard_count(inner_groups)
    experts = partial(
        run_experts,
        w_up=w_up,
        w_down=w_down,
        b_up=b_up,
        b_down=b_down,
        activation=activation,
        gated=gated,
        interleaved=interleaved,
        recipe=recipe,
        row_groups=row_groups,
        inner_groups=inner_groups,
    )
    if not has_values(x):  # shapes only: as if every row stayed
        expert_groups, dispatched, dispatch_groups = (), (), ()
    chosen, num_local = expert_index.reshape(-1), w_up.shape[0]
    record_load(chosen, num_local * shard_count(expert_groups))
    kept = torch.ones_like(chosen, dtype=torch.bool)
    if capacity_factor is not None and has_values(x):
        kept = _within_capacity(chosen, num_local * shard_count(expert_groups), capacity_factor, token_groups)
    rows, address = _route(chosen, kept, num_local, expert_groups, dispatched)
    return combine(x, expert_weight, rows, lambda sent: _through(sent, address, num_local, dispatch_groups, experts))


def _within_capacity(expert: Tensor, num_experts: int, capacity_factor: float, groups: Groups) -> Tensor:
    """(rows,) boolean: whether a row is among those that its expert takes of the tokens of all ``groups``."""
    counts = rows_of_experts(expert, num_experts)
    for group in reversed(groups):
        counts = group_all_gather_stacked(counts, group)
    before = counts.view(-1, num_experts)[: shard_index(groups)].sum(0)
    capacity = capacity_of(len(expert) * shard_count(groups), num_experts, capacity_factor)
    return first_of_experts(expert, before, capacity)


def _route(
    expert: Tensor, kept: Tensor, num_local: int, groups: Groups, dispatched: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """Those of the rows ``kept`` that are in play, sorted by address, and their addresses.

    An address is (place on the axes of dispatch, number of the expert there) as one number. A row whose expert is
    elsewhere on an axis without dispatch is another rank's to compute.
    """
    address = torch.zeros_like(expert)
    left = num_local * shard_count(groups)
    for group, moves in zip(groups, dispatched, strict=True):
        size = group_size(group)
        left //= size
        place = expert // left % size
        if moves:
            address = address * size + place
        else:
            kept = kept & (place == group_rank(group))
    address = address * num_local + expert % num_local
    rows = kept.nonzero().squeeze(1) if has_values(expert) else torch.arange(len(expert), device=expert.device)
    address, order = address[rows].sort(stable=True)
    return rows[order], address


def _through(rows: Tensor, address: Tensor, num_local: int, groups: Groups, experts: Experts) -> Tensor:
    """Rows, sorted by address, through their experts and back into the same order. groups: of dispatch, at most one."""
    if not groups:
        return experts(rows, address)
    (group,) = groups
    size, rank = group_size(group), group_rank(group)
    counts = rows_of_experts(address, size * num_local)
    incoming = group_all_gather_stacked(counts, group).view(size, size, num_local)[:, rank]
    totals = torch.stack([counts.view(size, num_local).sum(1), incoming.sum(1)]).tolist()
    sent, received = map(tuple, totals)
    arrived = apply(_AllToAllRows, rows, sent, received, group)
    expert = torch.arange(num_local, device=rows.device).repeat(size)
    expert = expert.repeat_interleave(incoming.flatten(), output_size=sum(received))
    expert, order = expert.sort(stable=True)
    out = experts(arrived.index_select(0, order), expert)
    out = torch.empty_like(out).index_copy(0, order, out)
    return cast(Tensor, apply(_AllToAllRows, out, received, sent, group))


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces ``composite.moe``."""
    call = arguments(node)
    names = ("x", "expert_index", "expert_weight", "w_up", "w_down", "b_up", "b_down")
    kwargs = {name: call[name] for name in ("activation", "gated", "interleaved", "capacity_factor")}
    groups, moving = _expert_axes(rule, assignment, mesh)
    kwargs["expert_groups"] = groups
    kwargs["dispatched"] = tuple(group in moving for group in groups)
    kwargs["dispatch_groups"] = joint_groups(moving)
    kwargs["inner_groups"] = axes_with({"f"}, assignment, mesh)
    if call["recipe"] is not None:
        kwargs |= {"recipe": call["recipe"], "row_groups": _row_axes(rule, assignment, mesh)}
    if kwargs["capacity_factor"] is not None:
        kwargs["token_groups"] = _token_axes(rule, assignment, mesh)
    return moe, tuple(call[name] for name in names), kwargs


def _expert_axes(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Groups, Groups]:
    """The axes that divide the experts, and those of them along which rows travel."""
    return axes_with({EXPERTS}, assignment, mesh), axes_with(set(rule.joint), assignment, mesh)


def _token_axes(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> Groups:
    return axes_with(set(rule.results[0][0]), assignment, mesh)


def _row_axes(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> Groups:
    """The axes whose ranks have other tokens, and the same experts."""
    tokens = axes_with({factor for dim in rule.results[0][:-1] for factor in dim}, assignment, mesh)
    _, moving = _expert_axes(rule, assignment, mesh)
    return tuple(axis for axis in tokens if axis not in moving)


def inside(node: fx.Node, rule: FactorRule, sizes: LocalSizes) -> Iterator[Inside]:
    """Counts of rows (int64) and the rows themselves, to their experts and back; gradients take the same ways.

    By a recipe, the maxima of each of the two products too.
    """
    call, mesh = arguments(node), sizes.mesh
    num_experts, factor = rule.sizes[EXPERTS], call["capacity_factor"]
    counts = _COUNT_BYTES * num_experts
    for axis in reversed(_token_axes(rule, sizes.assignment, mesh) if factor is not None else ()):
        counts *= sizes.size(axis)
        yield Inside("all_gather", "forward", (axis,), counts, dispatch=True)
    axes, moving = _expert_axes(rule, sizes.assignment, mesh)
    x, index = (operand.meta["val"] for operand in tensor_operands(node)[:2])
    rows = index.numel() * sizes.share(rule.operands[1]) * min(1.0, factor or 1.0)
    rows /= prod(sizes.size(axis) for axis in axes if axis not in moving)
    payload = rows * x.shape[-1] * sizes.itemsize(x.dtype)
    if moving:
        addresses = num_experts // prod(sizes.size(axis) for axis in axes if axis not in moving)
        num_ranks = prod(sizes.size(axis) for axis in moving)
        yield Inside("all_gather", "forward", moving, _COUNT_BYTES * addresses * num_ranks, dispatch=True)
        for phase in ("forward", "forward", "backward", "backward"):
            yield Inside("all_to_all", phase, moving, payload, dispatch=True)
    if call["recipe"] is not None:
        yield from _maxima(call["recipe"], rule, sizes, rows)


def _maxima(recipe: Recipe, rule: FactorRule, sizes: LocalSizes, rows: float) -> Iterator[Inside]:
    """rows: of a rank, on average. One collective on each axis and way for each product, of all that it shards."""
    scaling, mesh = SCALINGS[recipe], sizes.mesh
    shared, scales_weights = scaling.shared, scaling.reach != "tile"
    if shared is None:
        return
    inner = axes_with({"f"}, sizes.assignment, mesh)
    others = _row_axes(rule, sizes.assignment, mesh)
    axes, _ = _expert_axes(rule, sizes.assignment, mesh)
    experts = rule.sizes[EXPERTS] // prod(sizes.size(axis) for axis in axes)
    (_, out, into), (_, wide, _) = rule.operands[4], rule.operands[3]
    h, i, u = (prod(rule.sizes[f] for f in dim) for dim in (out, into, wide))
    pieces = prod(sizes.size(axis) for axis in inner)
    of_x, of_up, of_down = sizes.flows(0), sizes.flows(3), sizes.flows(4)
    # Of each product: number of columns, of what it sums, the axes of both, and whether there are its two gradients.
    products = (
        (u // pieces, h, inner, (), of_x, of_up),
        (h, i // pieces, (), inner, of_x or of_up, of_down),
    )
    for n, k, columns, depth, of_input, of_weight in products:
        of_weight = of_weight and scales_weights
        found: list[tuple[Phase, str, float, bool]] = []
        if shared == "tensor":
            found += [("forward", axis, experts, False) for axis in (*others, *columns)]
            found += [("forward", axis, 2 * experts, False) for axis in depth]
            if of_input or of_weight:
                found += [("backward", axis, experts, False) for axis in (*others, *columns)]
        else:
            found += [("forward", axis, rows + experts * n, True) for axis in depth]
            if of_input:
                found += [("backward", axis, rows + experts * k, True) for axis in columns]
            if of_weight:
                found += [("backward", axis, experts * (n + k), False) for axis in others]
        for phase, axis, count, of_rows in found:
            yield Inside("all_reduce", phase, (axis,), _MAXIMUM_BYTES * count, dispatch=of_rows)
