"""What mesh axes are for is read off the ops, whatever the axes are called."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from autopar.export.strategy import Strategy
from tests.export.plans import decoder_plan

NAMES = {"dp": "a", "cp": "b", "ep": "c", "tp": "d"}


@pytest.mark.parametrize(("dp", "cp", "ep", "tp"), list(product((1, 2, 4), repeat=4)))
def test_degrees_multiply_to_the_ranks(dp: int, cp: int, ep: int, tp: int) -> None:
    plan = decoder_plan(pp=2, dp=dp, cp=cp, ep=ep, tp=tp, experts=True, num_microbatches=4, names=NAMES)
    found = Strategy(plan)
    assert (found.data, found.context, found.tensor, found.experts) == (dp * ep, cp, tp, ep)
    assert found.pipeline * found.data * found.context * found.tensor * found.idle == found.world == plan.num_ranks
    assert found.microbatch_size * found.num_microbatches * found.data == plan.batch.global_size
    assert found.expert_tensor == tp
    assert not found.exceptions


@pytest.mark.parametrize("order", list(permutations(("dp", "cp", "ep", "tp"))))
def test_order_of_axes_changes_no_degree(order: tuple[str, ...]) -> None:
    found = Strategy(decoder_plan(dp=2, cp=2, tp=4, order=order))
    assert (found.data, found.context, found.tensor, found.experts) == (2, 2, 4, 1)


@pytest.mark.parametrize("kind", ["ring", "gathered", "heads"])
def test_kinds_of_context_parallelism(kind: str) -> None:
    (axis,) = Strategy(decoder_plan(cp=4, kind=kind)).of_role("context")
    assert axis.attention == kind


def test_heads_on_a_tensor_axis_are_tensor_parallelism() -> None:
    found = Strategy(decoder_plan(tp=4, sequence_parallel=True))
    assert (found.tensor, found.context, found.sequence_parallel) == (4, 1, True)
    assert not Strategy(decoder_plan(tp=4)).sequence_parallel


def test_an_axis_without_work_is_idle() -> None:
    plan = decoder_plan(dp=2)
    idle = plan.model_copy(update={"mesh": {**plan.mesh, "x": 3}})
    assert Strategy(idle).idle == 3


def test_ops_that_do_otherwise_are_named() -> None:
    plan = decoder_plan(dp=2, tp=2)
    head = plan.blocks[2]
    changed = head.model_copy(update={"ops": {**head.ops, "linear": {"dp": "d0"}}})
    found = Strategy(plan.model_copy(update={"blocks": [*plan.blocks[:2], changed]}))
    assert found.tensor == 2
    assert found.exceptions == ("head linear: repeated on tp (tensor)",)


@pytest.mark.parametrize(("zero", "shard", "expected"), [(0, None, (1, 8)), (3, None, (8, 1)), (2, 4, (4, 2))])
def test_zero_groups(zero: int, shard: int | None, expected: tuple[int, int]) -> None:
    found = Strategy(decoder_plan(dp=8, zero=zero, shard=shard))
    assert (found.sharded, found.replicated) == expected


def test_stacks_of_matrices_on_an_axis_for_experts_are_experts() -> None:
    plan = decoder_plan(dp=2, ep=2)
    for block in plan.blocks:
        if "mlp.up/linear" in block.ops:
            block.ops["mlp.experts/bmm"] = {"ep": "b0"}
    found = Strategy(plan)
    assert (found.data, found.experts) == (4, 2)
