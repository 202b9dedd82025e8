"""The multi-process harness returns results, and reports failures and hangs instead of hanging."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, run_ranks


def _sum(scale: float) -> torch.Tensor:
    x = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    y = x.detach().clone()
    dist.all_reduce(y)
    return y * scale + 0 * x


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_results_by_rank() -> None:
    results = run_ranks(_sum, 4, 2.0)
    assert [r.tolist() for r in results] == [[12.0, 12.0]] * 4
    assert not results[0].requires_grad


def test_failure_names_rank_and_cause() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*rank one is unhappy"):
        run_ranks(_fail_on_one, 2)
    assert time.monotonic() - start < 20


def test_hang_is_reported_with_a_stack() -> None:
    with pytest.raises(RankFailure, match=r"(?s)did not finish in 4 s.*_hang_on_one"):
        run_ranks(_hang_on_one, 2, timeout=4)


def test_local_function_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="top level"):
        run_ranks(local, 2)
