"""What is done after a failure follows from what is known, and from nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from autopar.ir.errors import LaunchError
from autopar.supervision.decision import Decision, Facts, Source, decide, newest, next_generation, places_of


def facts(
    index: int, slots: int = 2, copies: tuple[tuple[int, int, int, int], ...] = (), on_disk: int | None = None
) -> Facts:
    return Facts(index=index, host=f"h{index}", slots=slots, copies=copies, on_disk=on_disk)


def no_plan(room: int) -> None:
    return None


def test_ranks_stay_where_they_were() -> None:
    assert places_of([facts(0), facts(1)], 4, {0: (2, 3), 1: (0, 1)}) == {0: (2, 3), 1: (0, 1)}


def test_a_spare_takes_the_ranks_of_a_lost_host() -> None:
    assert places_of([facts(0), facts(2)], 4, {0: (0, 1), 1: (2, 3), 2: ()}) == {0: (0, 1), 2: (2, 3)}


def test_more_room_than_ranks_leaves_spares() -> None:
    assert places_of([facts(0), facts(1), facts(2)], 4, {}) == {0: (0, 1), 1: (2, 3), 2: ()}


def test_copies_count_before_a_checkpoint_of_the_same_step() -> None:
    copies = ((7, 3, 0, 2, None), (7, 3, 1, 2, None), (8, 3, 0, 2, None))
    assert newest([facts(0, copies=copies, on_disk=7)]) == Source(kind="copies", step=7, generation=3)
    assert newest([facts(0, copies=copies, on_disk=8)]) == Source(kind="disk", step=8)
    assert newest([facts(0, copies=copies[2:])]) == Source(kind="start")


def test_copies_of_one_state_may_be_on_several_hosts() -> None:
    found = newest([facts(0, copies=((5, 1, 0, 2, None),)), facts(1, copies=((5, 1, 1, 2, None),))])
    assert found == Source(kind="copies", step=5, generation=1)


def test_what_a_copy_leaves_out_is_on_its_own_host_or_on_another() -> None:
    left_out, whole = (5, 1, 0, 2, 1), (5, 1, 1, 2, None)
    assert newest([facts(0, copies=(left_out, whole))]) == Source(kind="copies", step=5, generation=1)
    assert newest([facts(0, copies=(left_out, (5, 1, 1, 2, 0)))]) == Source(kind="start")


def test_a_generation_has_a_number_of_its_own() -> None:
    assert next_generation([facts(0), facts(1)], 1, 0) == 1
    assert next_generation([facts(0), facts(1, copies=((9, 5, 0, 2, None),))], 1, 0) == 6, "copies of an earlier start"
    assert next_generation([facts(0), facts(1, copies=((9, 5, 0, 2, None),))], 2, 6) == 7, "it ended without a copy"


def test_too_few_ranks_get_a_plan_of_their_own() -> None:
    found = decide([facts(0)], 4, (4, "for four"), {0: (0, 1), 1: (2, 3)}, lambda room: (room, f"for {room}"))
    assert (found.plan, found.same_plan, found.ranks, found.world_size) == ("for 2", False, {0: (0, 1)}, 2)


def test_ranks_that_come_back_get_the_first_plan_again() -> None:
    found = decide([facts(0), facts(1)], 5, (4, "for four"), {0: (0, 1)}, no_plan)
    assert (found.plan, found.same_plan, found.ranks) == ("for four", True, {0: (0, 1), 1: (2, 3)})


def test_no_plan_for_what_is_left_is_an_error() -> None:
    with pytest.raises(LaunchError, match="1 of 4 ranks are left"):
        decide([facts(0, slots=1)], 2, (4, "for four"), {}, no_plan)


def test_a_decision_travels_as_json() -> None:
    found = decide([facts(0), facts(1, slots=0)], 1, (2, "p"), {}, no_plan)
    assert Decision.of_json(json.loads(json.dumps(asdict(found)))) == found
    one = facts(3, copies=((5, 1, 0, 2, None),))
    assert Facts.of_json(json.loads(json.dumps(asdict(one)))) == one
