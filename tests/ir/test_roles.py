"""Batch and sequence dimensions followed through small graphs."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.ir.analysis.batch_and_sequence import find_roles, microbatch_obstacle
from autopar.ir.graph import CapturedModel
from tests.ir.tracing import Tracer, aten

B, S, D = 8, 4, 16


def named(captured: CapturedModel, name: str) -> fx.Node:
    return next(node for node in captured.graph.nodes if node.name == name)


def test_batch_and_sequence_run_through_a_language_model() -> None:
    t = Tracer()
    ids = t.input("ids", B, S, dtype=torch.int64)
    x = t.call(aten.embedding.default, t.param("embed.weight", 64, D), ids)
    h = t.linear("up", x, 32)
    heads = t.call(aten.view.default, h, [B, S, 4, 8])
    turned = t.call(aten.transpose.int, heads, 1, 2)
    loss = t.call(aten.mean.default, turned)
    captured = t.done(loss)
    roles = find_roles(captured)
    assert [roles.batch_dim[n] for n in (ids, x, h, heads, turned, loss)] == [0, 0, 0, 0, 0, None]
    assert [roles.sequence_dim[n] for n in (ids, x, h, heads, turned, loss)] == [1, 1, 1, 1, 2, None]
    assert roles.batch_dim[named(captured, "up_weight")] is None
    assert all(roles.batch[n] is not None for n in (x, h, heads, turned, loss))
    assert all(len(roles.sequence[n]) == 1 for n in (x, h, heads, turned, loss))
    assert microbatch_obstacle(captured, roles) is None


def test_sums_over_the_batch_are_followed_through_linear_ops() -> None:
    t = Tracer()
    x = t.input("x", B, D)
    first = t.call(aten.mean.default, t.linear("a", x, D))
    second = t.call(aten.sum.default, t.linear("b", x, D))
    scaled = t.call(aten.mul.Tensor, second, 0.01)
    loss = t.call(aten.add.Tensor, first, scaled)
    captured = t.done(loss)
    roles = find_roles(captured)
    assert str(roles.batch[scaled]).startswith("+") and str(roles.batch[loss]).startswith("+")
    assert microbatch_obstacle(captured, roles) is None


def test_what_reads_no_batch_is_added_in_shares() -> None:
    t = Tracer()
    x = t.input("x", B, D)
    weight = t.param("a.weight", D, D)
    total = t.call(aten.sum.default, t.call(aten.linear.default, x, weight))
    penalty = t.call(aten.sum.default, t.call(aten.square.default, weight))
    loss = t.call(aten.add.Tensor, total, penalty)
    captured = t.done(loss)
    roles = find_roles(captured)
    assert roles.batch[penalty] is None and str(roles.batch[loss]).startswith("+")
    assert microbatch_obstacle(captured, roles) is None


def test_a_sum_over_the_batch_used_otherwise_is_an_obstacle() -> None:
    t = Tracer()
    x = t.input("x", B, D)
    total = t.call(aten.sum.default, t.linear("a", x, D))
    captured = t.done(t.call(aten.exp.default, total))
    obstacle = microbatch_obstacle(captured, find_roles(captured))
    assert obstacle is not None and "exp" in obstacle and "sum over the whole batch" in obstacle
    assert "model.py:" in obstacle


def test_an_op_across_rows_is_an_obstacle_only_where_the_loss_needs_it() -> None:
    t = Tracer()
    x = t.input("x", B, D)
    h = t.linear("a", x, D)
    t.path = "head"
    scores = t.call(aten.mm.default, h, t.call(aten.t.default, h))
    loss = t.call(aten.mean.default, h)
    metric = t.done(loss, scores)
    roles = find_roles(metric)
    assert roles.obstacles and microbatch_obstacle(metric, roles) is None

    t = Tracer()
    h = t.linear("a", t.input("x", B, D), D)
    t.path = "head"
    scores = t.call(aten.mm.default, h, t.call(aten.t.default, h))
    contrastive = t.done(t.call(aten.mean.default, scores))
    obstacle = microbatch_obstacle(contrastive, find_roles(contrastive))
    assert obstacle is not None and "mm (head)" in obstacle


def test_batch_statistics_are_an_obstacle() -> None:
    t = Tracer()
    x = t.input("x", B, D, 4, 4)
    mean, var = t.buffer("mean", D), t.buffer("var", D)
    normed = t.call(aten._native_batch_norm_legit_functional.default, x, None, None, mean, var, True, 0.1, 1e-5)
    captured = t.done(t.call(aten.mean.default, t.call(operator.getitem, normed, 0)))
    roles = find_roles(captured)
    assert roles.batch[normed] is not None
    obstacle = microbatch_obstacle(captured, roles)
    assert obstacle is not None and "statistics over the whole batch" in obstacle


def test_a_tensor_expanded_to_the_batch_has_a_batch_dimension() -> None:
    """Positions are made for every row: a microbatch makes them for its own rows only."""
    t = Tracer()
    x = t.input("x", B, S, D)
    positions = t.call(aten.unsqueeze.default, t.call(aten.arange.default, S, device="meta"), 0)
    rows = t.call(aten.expand.default, positions, [B, S])
    looked_up = t.call(aten.embedding.default, t.param("table", S, D), rows)
    joined = t.call(aten.add.Tensor, x, looked_up)
    captured = t.done(t.call(aten.mean.default, joined))
    roles = find_roles(captured)
    assert roles.batch_dim[rows] == 0 and roles.batch_dim[looked_up] == 0
    assert roles.batch[rows] is not None
    assert roles.batch_dim[positions] is None
    assert microbatch_obstacle(captured, roles) is None


def test_rows_that_cannot_be_made_in_parts_are_an_obstacle() -> None:
    t = Tracer()
    x = t.input("x", B, D)
    rows = t.call(aten.unsqueeze.default, t.call(aten.arange.default, B, device="meta", dtype=torch.float32), 1)
    captured = t.done(t.call(aten.mean.default, t.call(aten.mul.Tensor, t.linear("a", x, D), rows)))
    obstacle = microbatch_obstacle(captured, find_roles(captured))
    assert obstacle is not None and "cannot be made in parts" in obstacle


def test_batch_merged_with_sequence_is_still_the_batch() -> None:
    t = Tracer()
    x = t.input("x", B, S, D)
    flat = t.call(aten.view.default, x, [B * S, D])
    h = t.linear("a", flat, 32)
    back = t.call(aten.view.default, h, [B, S, 32])
    captured = t.done(t.call(aten.mean.default, back))
    roles = find_roles(captured)
    assert [roles.batch_dim[n] for n in (flat, h, back)] == [0, 0, 0]
    assert microbatch_obstacle(captured, roles) is None
