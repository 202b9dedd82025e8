"""What each strategy sends is counted while it trains, per block and per byte."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import autopar
from autopar.ir.primitives.collective_counter import CollectiveCounter
from benchmarks.issued import compared
from benchmarks.models import CASES
from benchmarks.parity import constraints_of
from benchmarks.traces import Steps, train_parallel
from tests.end_to_end.stacks import ROWS, SEQ, WIDTH, Attention, FeedForward, batch, stack, tensor_parallel_plan
from tests.harness import run_ranks

Counts = dict[tuple[str, str], tuple[int, float]]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast")
ACTIVATION_BYTES = ROWS * SEQ * WIDTH * 4


def _train(block: type[nn.Module], depth: int, constraints: dict[str, Any]) -> tuple[Counts, list[int | None]]:
    model = stack(block, depth)
    if "sequence" in constraints:
        constraints = {"plan": tensor_parallel_plan(model, dist.get_world_size(), **constraints)}
    parallel = autopar.parallelize(model, dist.get_world_size(), example_inputs=batch(), **constraints)
    rows = parallel.shard_batch(batch())
    parallel.step(**rows)
    with CollectiveCounter() as counter:
        parallel.step(**rows)
    counts: Counts = {}
    for kind in KINDS:
        for phase in ("forward", "backward"):
            found = list(counter.select(kind, phase=phase))
            counts[kind, phase] = (len(found), sum(one.sent_bytes for one in found))
    return counts, [one.peer for one in counter.select("send")]


def _train_both(block: type[nn.Module], constraints: dict[str, Any]) -> list[tuple[Counts, list[int | None]]]:
    return [_train(block, depth, constraints) for depth in (2, 3)]


def per_block(block: type[nn.Module], ranks: int, constraints: dict[str, Any]) -> Counts:
    """What one block more adds to a step."""
    (two, _), (three, _) = run_ranks(_train_both, ranks, block, constraints)[0]
    added = {key: (three[key][0] - two[key][0], three[key][1] - two[key][1]) for key in two}
    return {key: value for key, value in added.items() if value != (0, 0.0)}


@pytest.mark.parametrize("block", [FeedForward, Attention])
def test_tensor_parallel_block(block: type[nn.Module]) -> None:
    # The bias after the row-split matmul is added in equal parts, so its gradient joins the sum at the step's end.
    bias = WIDTH * 4
    assert per_block(block, 2, {"sequence": False}) == {
        ("all_reduce", "forward"): (1, ACTIVATION_BYTES),
        ("all_reduce", "backward"): (1, ACTIVATION_BYTES + bias),
    }


@pytest.mark.parametrize("block", [FeedForward, Attention])
def test_sequence_parallel_block_sends_the_same_volume(block: type[nn.Module]) -> None:
    counts = per_block(block, 2, {"sequence": True})
    # Gradients of what is replicated between the sharded ops (norms, biases) are summed once a step.
    replicated = counts.pop(("all_reduce", "backward"), (0, 0.0))
    assert replicated[1] <= 4 * WIDTH * 4
    half = ACTIVATION_BYTES / 2
    assert counts == {
        ("all_gather", "forward"): (1, half),
        ("reduce_scatter", "forward"): (1, half),
        ("all_gather", "backward"): (1, half),
        ("reduce_scatter", "backward"): (1, half),
    }


# Plans by number of ranks: redistributions, gathers and sums of ZeRO, rings, recomputation, experts and pipelines.
_RECORDED = [
    (2, ["llama:tp2 remat", "mixtral:ep2"]),
    pytest.param(2, ["llama:cp2 remat", "resnet:dp2"], marks=pytest.mark.slow),
    pytest.param(4, ["llama:zero3 tp2 sp", "mixtral:ep2 zero3 all", "t5:dp2 pp2"], marks=pytest.mark.slow),
]


TWO = Steps(sgd=2, adamw=0, compared=(1,))


def _unrecorded(cells: list[str]) -> dict[str, list[str]]:
    """Cell -> where a step of it differs from the records of its placed model."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        model, _, plan = cell.partition(":")
        case, texts = CASES[model], found.setdefault(cell, [])
        watch = partial(compared, found=texts)
        constraints = constraints_of(case, plan)
        _, chosen = train_parallel(
            case, dist.get_world_size(), constraints, Steps(sgd=2, adamw=0, compared=(1,)), watch
        )
        assert chosen.num_ranks == dist.get_world_size()
    return found


# Branches that no input of a stage reaches, batch statistics, outputs of several blocks: once in a split backward.
_SPLIT = ["t5:dp2 pp2 zb-h1", "t5:tp2 pp2 zb-v", "whisper:tp2 pp2 zb-v", "resnet:dp2 pp2 zb-h1"]


@pytest.mark.slow
def test_a_split_backward_sends_what_a_whole_one_does() -> None:
    assert run_ranks(_unrecorded, 4, _SPLIT)[0] == {cell: [] for cell in _SPLIT}


@pytest.mark.parametrize(("ranks", "cells"), _RECORDED)
def test_what_is_recorded_of_a_placed_model_is_what_runs(ranks: int, cells: list[str]) -> None:
    assert run_ranks(_unrecorded, ranks, cells)[0] == {cell: [] for cell in cells}


def _unrecorded_of_another_plan() -> list[str]:
    """A step under sequence parallelism against the records of a plan without it."""
    model, found = stack(FeedForward, 3), list[str]()
    own, other = (tensor_parallel_plan(model, 2, sequence=sequence) for sequence in (True, False))
    parallel = autopar.parallelize(model, 2, example_inputs=batch(), plan=own)
    rows = parallel.shard_batch(batch())
    parallel.step(**rows)
    with compared(parallel, found, plan=other):
        parallel.step(**rows)
    return found


def test_a_step_under_another_plan_is_told() -> None:
    found = run_ranks(_unrecorded_of_another_plan, 2)[0]
    assert any("reduce_scatter" in text and "recorded 0" in text for text in found)
    assert any("all_reduce" in text and "issued 0" in text for text in found)


def _gradient_bytes() -> int:
    return sum(4 * p.numel() for p in stack().parameters())


def test_data_parallelism_sends_each_gradient_once() -> None:
    counts, _ = run_ranks(_train, 4, FeedForward, 2, {"dp": 4, "zero": 0})[0]
    sent = sum(counts["all_reduce", phase][1] for phase in ("forward", "backward"))
    expected = 2 * 3 / 4 * _gradient_bytes()
    # The loss, the count of its targets, and what ranks agree on.
    assert expected <= sent <= expected + 256


def _block_bytes() -> int:
    return sum(4 * p.numel() for p in FeedForward().parameters())


def test_fully_sharded_block_sends_half_as_much_again() -> None:
    """All-gathers before forward and before backward and a reduce-scatter, against the all-reduce of the same bytes."""
    share = 3 / 4 * _block_bytes()
    assert per_block(FeedForward, 4, {"dp": 4, "zero": 3}) == {
        ("all_gather", "forward"): (1, share),
        ("all_gather", "backward"): (1, share),
        ("reduce_scatter", "backward"): (1, share),
    }
    assert 3 * share == 1.5 * (2 * 3 / 4 * _block_bytes())


def test_hybrid_sharding_sends_shards_across() -> None:
    """Shards over pairs, and an all-reduce of the half that each rank holds with the other pair."""
    half = 1 / 2 * _block_bytes()
    assert per_block(FeedForward, 4, {"dp": 4, "zero": 3, "shard": 2}) == {
        ("all_gather", "forward"): (1, half),
        ("all_gather", "backward"): (1, half),
        ("reduce_scatter", "backward"): (1, half),
        ("all_reduce", "backward"): (1, 2 * 1 / 2 * half),
    }


def _by_level(cases: list[tuple[int, int]]) -> list[dict[str, float]]:
    """For each (level, microbatches): bytes sent a step by kind, the counts of the loss left out."""
    found = []
    for zero, chunks in cases:
        parallel = autopar.parallelize(stack(), 2, example_inputs=batch(), dp=2, zero=zero, num_microbatches=chunks)
        rows = parallel.shard_batch(batch())
        parallel.step(**rows)
        with CollectiveCounter() as counter:
            parallel.step(**rows)
        agreement = parallel.engine.accord.group_name
        large = [one for one in counter.issued if one.payload_bytes > 64 and one.group != agreement]
        found.append({kind: sum(one.sent_bytes for one in large if one.kind == kind) for kind in KINDS[:3]})
    return found


def test_microbatches_do_not_synchronise() -> None:
    cases = [(zero, chunks) for zero in range(4) for chunks in (1, 2)]
    sent = dict(zip(cases, run_ranks(_by_level, 2, cases)[0], strict=True))
    size = _gradient_bytes()
    for chunks in (1, 2):
        assert sent[0, chunks] == {"all_reduce": size, "all_gather": 0, "reduce_scatter": 0}
        assert sent[1, chunks] == {"all_reduce": 0, "all_gather": size / 2, "reduce_scatter": size / 2}
        # What shards gradients between microbatches has to scatter those of each; parameters stay gathered.
        assert sent[2, chunks] == {"all_reduce": 0, "all_gather": size / 2, "reduce_scatter": chunks * size / 2}
        assert sent[3, chunks]["reduce_scatter"] == chunks * size / 2
        # Backward begins with the last block, which is still there.
        last = 4 * sum(p.numel() for p in stack().head.parameters())
        assert sent[3, chunks]["all_gather"] == chunks * (2 * size - last) / 2


def test_stages_send_to_neighbours_only() -> None:
    constraints = {"pp": 4, "num_microbatches": 4, "schedule": "1f1b"}
    for rank, (counts, peers) in enumerate(run_ranks(_train, 4, FeedForward, 4, constraints)):
        assert {abs(peer - rank) for peer in peers if peer is not None} <= {1}
        sends = sum(counts["send", phase][0] for phase in ("forward", "backward"))
        assert sends == 4 * (2 if 0 < rank < 3 else 1)
