"""What does not fit is refused on every rank, with a message, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.ir.errors import AutoparError, CaptureError, PlanMismatch
from autopar.runtime.agreement import agree, from_first
from autopar.runtime.engine import Engine
from autopar.runtime.mesh import check_world_size
from autopar.runtime.module import ParallelModule
from tests.harness import run_ranks
from tests.runtime.handmade import batch, captured_tied, data_parallel_programs, model, plan_for


def _message(call: Any) -> str:
    try:
        call()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise CaptureError("line 7 branches on data")


def _one_rank_fails() -> list[str]:
    captured = captured_tied()
    plan = plan_for({"dp": 2})
    pm = ParallelModule(Engine(model(), captured, plan, data_parallel_programs(captured, plan)))
    rows = pm.shard_batch(batch(0))
    return [
        _message(lambda: agree(lambda: _fail_on(1))),
        _message(lambda: from_first(lambda: str(_fail_on(0)))),
        _message(lambda: pm.step(rows["tokens"][:, None], rows["labels"])),
        _message(lambda: pm.step(tokens=rows["tokens"])),
        _message(lambda: pm.step(rows["tokens"], rows["labels"], extra=torch.zeros(1))),
        _message(lambda: pm.step(rows["tokens"].float(), rows["labels"])),
        _message(lambda: pm.shard_batch(torch.zeros(0, 3))),
        _message(lambda: pm.load_state_dict({"embed.weight": torch.zeros(2, 2)}, strict=False)),
        _message(lambda: pm.load_state_dict({})),
        _message(lambda: autopar.parallelize(nn.Linear(2, 2), 3)),
        _message(lambda: autopar.parallelize(nn.Linear(2, 2), 2, tensor_parallel=2)),
        _message(lambda: list(autopar.parallelize(nn.Linear(2, 2), 2).parameters())),
    ]


def test_messages() -> None:
    for rank, messages in enumerate(run_ranks(_one_rank_fails, 2)):
        expected = [
            "CaptureError: " + ("on rank 1: " if rank == 0 else "") + "line 7 branches on data",
            "CaptureError: " + ("on rank 0: " if rank == 1 else "") + "line 7 branches on data",
            "kwargs['tokens'] is int64[8, 1]",
            "kwargs['labels'] is missing",
            "kwargs['extra']: not an input",
            "kwargs['tokens'] is float32[8]",
            "float32[0, 3]; expected the global batch, of at least one row",
            "embed.weight has shape (2, 2), expected (16, 8)",
            "missing ['embed.weight'",
            "PlanMismatch: the mesh has 3 ranks, this job has 2",
            "unknown constraint 'tensor_parallel'",
            "not captured yet",
        ]
        for message, part in zip(messages, expected, strict=True):
            assert part in message
        assert "expected, on each data-parallel rank (8 of the 16 rows" in messages[2]


def test_world_size() -> None:
    with pytest.raises(PlanMismatch, match=r"plan is for 4 ranks .2 stages of mesh .dp=2.., this job has 3"):
        check_world_size(plan_for({"dp": 2}, stages=2), 3)
