"""Ranks that share a node in the plan share a machine, and are numbered machine by machine."""

from __future__ import annotations

import pytest

from autopar.ir.errors import LaunchError
from autopar.launching.placement import Machine, check_room, groups_of, places_of, uses_gpus
from tests.launching.plans import plan_of


@pytest.mark.parametrize(
    ("ranks", "per_node", "groups"), [(4, 2, [2, 2]), (4, 8, [4]), (6, 4, [4, 2]), (1, 1, [1]), (3, 1, [1, 1, 1])]
)
def test_groups_are_the_nodes_of_the_plan(ranks: int, per_node: int, groups: list[int]) -> None:
    assert groups_of(plan_of(ranks, per_node)) == groups


def test_ranks_are_numbered_machine_by_machine() -> None:
    places = places_of([2, 2, 2], ["a", "b", "a"])
    assert [place.worker for place in places] == [2, 3, 0, 1, 4, 5]
    assert [(place.node, place.local_rank, place.local_size) for place in places] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 4), (1, 1, 4), (1, 2, 4), (1, 3, 4),
    ]  # fmt: skip


def test_a_smaller_last_group_stays_the_last() -> None:
    places = places_of([2, 2, 1], ["a", "b", "a"])
    assert [place.worker for place in places] == [2, 3, 0, 1, 4]
    assert places[-1].local_rank == 2


def machines(*gpus: int, cpus: int = 64) -> list[Machine]:
    return [Machine(name=f"10.0.0.{i}", num_gpus=count, num_cpus=cpus) for i, count in enumerate(gpus)]


@pytest.mark.parametrize(
    ("groups", "gpus", "fits"),
    [
        ([4, 4], (8,), True),
        ([4, 4], (4, 4), True),
        ([4, 4], (6, 2), False),
        ([4, 2], (6,), True),
        ([4, 2], (5, 1), False),
        ([4, 2], (4, 3), True),
        ([4, 2], (4, 4), True),
    ],
)
def test_room(groups: list[int], gpus: tuple[int, ...], fits: bool) -> None:
    if fits:
        check_room(groups, machines(*gpus), gpus=True, cpus_per_rank=1)
        return
    with pytest.raises(LaunchError, match=r"needs .* × 4 GPUs and 4 CPUs.*\n.*10\.0\.0\.0 with"):
        check_room(groups, machines(*gpus), gpus=True, cpus_per_rank=1)


def test_cpus_count_too() -> None:
    check_room([2], machines(0, cpus=8), gpus=False, cpus_per_rank=4)
    with pytest.raises(LaunchError, match="1 × 10 CPUs"):
        check_room([2], machines(0, cpus=8), gpus=False, cpus_per_rank=5)
    with pytest.raises(LaunchError, match="no machines"):
        check_room([2], [], gpus=False, cpus_per_rank=1)


def test_plans_for_gpus_run_on_cpus_where_there_are_no_gpus() -> None:
    assert not uses_gpus(plan_of(2, 2), machines(8))
    assert uses_gpus(plan_of(2, 2, gpu="h100-sxm"), machines(8))
    assert not uses_gpus(plan_of(2, 2, gpu="h100-sxm"), machines(0))
