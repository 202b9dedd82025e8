"""The critical path that is read from traces of two ranks (``benchmarks/measured_path.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.checking.recorder import Communication
from benchmarks.measured_path import STEP, WAIT, Key, Segment, critical_path, read_steps, waited


def communications(*kinds: tuple[str, tuple[int, ...]]) -> list[Communication]:
    return [Communication(kind, ranks, 1, torch.float32) for kind, ranks in kinds]


def trace(path: Path, *events: tuple[str, float, float, int]) -> Path:
    """events: name, beginning and duration in milliseconds, thread."""
    found: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": name,
            "ts": 1000.0 * start,
            "dur": 1000.0 * duration,
            "tid": thread,
            "cat": "user_annotation" if name in (STEP, WAIT) else "cpu_op",
        }
        for name, start, duration, thread in events
    ]
    path.write_text(json.dumps({"traceEvents": found}))
    return path


def test_a_path_goes_where_the_last_rank_to_come_was(tmp_path: Path) -> None:
    """Rank 1 receives what rank 0 sends after 30 ms, and rank 0 waits for the sum that rank 1 comes to at 70 ms.

    gloo runs a reduce-scatter as an all-reduce.
    """
    first = trace(
        tmp_path / "0.json",
        (STEP, 0, 100, 1),
        ("c10d::send", 30, 0.1, 1), ("gloo:send", 30, 15, 1), (WAIT, 45, 0.2, 1),
        ("c10d::_reduce_scatter_base_", 50, 0.1, 1), ("gloo:all_reduce", 50, 40, 7), (WAIT, 51, 39, 1),
    )  # fmt: skip
    second = trace(
        tmp_path / "1.json",
        (STEP, 0, 95, 2),
        ("c10d::recv_", 5, 0.1, 2), ("gloo:recv", 5, 35, 2), (WAIT, 6, 34, 2),
        ("c10d::_reduce_scatter_base_", 70, 0.1, 2), ("gloo:all_reduce", 70, 20, 8), (WAIT, 71, 19, 2),
    )  # fmt: skip
    (one,) = read_steps(first, 0, communications(("send", (1,)), ("reduce_scatter", (0, 1))))
    (other,) = read_steps(second, 1, communications(("recv", (0,)), ("reduce_scatter", (0, 1))))
    send, total = Key("send", (0, 1), 0), Key("reduce_scatter", (0, 1), 0)
    assert critical_path([one, other]) == [
        Segment(0, 0, 30e3, None),
        Segment(0, 30e3, 40e3, send),
        Segment(1, 40e3, 70e3, None),
        Segment(1, 70e3, 90e3, total),
        Segment(0, 90e3, 100e3, None),
    ]
    # The end of a send is seen late; a call of 0.2 ms did not wait.
    assert [(start, end, part.key) for start, end, part in waited(one)] == [(51e3, 90e3, total)]


def test_a_trace_of_another_program_is_refused(tmp_path: Path) -> None:
    path = trace(tmp_path / "0.json", (STEP, 0, 10, 1), ("c10d::allreduce_", 1, 1, 1), ("gloo:all_reduce", 1, 1, 7))
    with pytest.raises(AssertionError, match="the trace has"):
        read_steps(path, 0, communications(("all_gather", (0, 1))))
