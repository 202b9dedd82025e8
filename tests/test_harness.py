"""The multi-process harness returns results, waits for who computes, and reports failures and hangs."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, run_ranks
from tests.patience import run


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


def _take_longer_than_patience(seconds: float) -> None:
    """One rank computes and the other waits for it."""
    until = time.monotonic() + seconds
    while dist.get_rank() == 0 and time.monotonic() < until:
        pass
    dist.barrier()


def _run_in_circles() -> None:
    while True:
        pass


def test_results_by_rank() -> None:
    results = run_ranks(_sum, 4, 2.0)
    assert [r.tolist() for r in results] == [[12.0, 12.0]] * 4
    assert not results[0].requires_grad


def test_failure_names_rank_and_cause() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*rank one is unhappy"):
        run_ranks(_fail_on_one, 2)


def test_hang_is_reported_with_a_stack() -> None:
    with pytest.raises(RankFailure, match=r"(?s)ranks \[0, 1\] of 2 did not finish.*did nothing for 3 s.*_hang_on_one"):
        run_ranks(_hang_on_one, 2, idle_s=3)


def test_ranks_that_compute_are_waited_for() -> None:
    run_ranks(_take_longer_than_patience, 2, 5.0, idle_s=2.5)


def test_ranks_that_run_in_circles_are_not() -> None:
    with pytest.raises(RankFailure, match=r"(?s)used . s of CPU time, more than 2\b.*_run_in_circles"):
        run_ranks(_run_in_circles, 2, limit_s=1)


def test_commands_are_waited_for_while_they_compute() -> None:
    command = (sys.executable, "-c")
    assert run(*command, "print(sum(range(10**7)))").stdout.startswith("49999995")
    with pytest.raises(TimeoutError, match="did nothing for 2 s"):
        run(*command, "import time; time.sleep(60)", idle_s=2)


def test_local_function_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="top level"):
        run_ranks(local, 2)
