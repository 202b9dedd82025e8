"""Ranks on a Ray cluster of two machines: placed by the plan, stopped together, nothing left behind."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.launching.plans import run

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run(sys.executable, "-m", "tests.launching.ray_checks")
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_ranks_of_a_node_share_a_machine(found: dict[str, Any]) -> None:
    ranks = found["where"]
    hosts = [rank["host"] for rank in ranks]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert [rank["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {rank["total"] for rank in ranks} == {6.0}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"1"}


def test_too_little_room_is_said_at_once(found: dict[str, Any]) -> None:
    refused = found["no room"]
    assert refused["type"] == "LaunchError" and refused["seconds"] < 5
    assert "it needs 1 × 4 CPUs, each on one machine" in refused["message"]
    assert refused["message"].count("with 0 GPUs and 2 CPUs") == 2


def test_room_that_others_take_is_not_waited_for_without_end(found: dict[str, Any]) -> None:
    assert found["busy"]["type"] == "LaunchError" and found["busy"]["seconds"] < 10
    assert "within 1 s; others use it" in found["busy"]["message"]


def test_an_error_of_a_rank_is_raised_once(found: dict[str, Any]) -> None:
    assert (found["refuse"]["type"], found["refuse"]["message"]) == (
        "InvalidInput",
        "on rank 1: this rank does not like it",
    )


@pytest.mark.parametrize(("how", "words"), [("die", "died"), ("break_down", "KeyError: 'not there'")])
def test_a_rank_that_fails_ends_the_others(found: dict[str, Any], how: str, words: str) -> None:
    assert found[how]["type"] == "LaunchError"
    assert found[how]["message"].startswith("rank 1 of 2 failed:")
    assert words in found[how]["message"]


def test_everything_is_given_back(found: dict[str, Any]) -> None:
    assert found["free"] == 4
    assert set(found["groups"]) == {"REMOVED"}
