"""Schedules as dependency graphs: those that there are run to their end; a deadlock is printed."""

from __future__ import annotations

import networkx
import pytest

from autopar.ir.errors import UnprovenProgram
from autopar.ir.schedule import SCHEDULES, Action, Pipelining
from autopar.passes.verify.schedule import verify_schedule

SHAPES = [
    shape
    for schedule in SCHEDULES
    for ranks in (1, 2, 4)
    for count in (1, 4, 8)
    for virtual in (1, 2, 3)
    if (shape := Pipelining(schedule, ranks, count, virtual)).obstacle() is None
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_schedule_runs_to_its_end(shape: Pipelining) -> None:
    verify_schedule(shape)


def test_a_schedule_that_runs_is_proved_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """networkx looks for a cycle in quadratic time: 20 s for 16 stages and 1,024 microbatches."""
    monkeypatch.setattr(networkx, "find_cycle", None)
    verify_schedule(Pipelining("1f1b", 16, 256))


def test_a_deadlock_is_printed_action_by_action() -> None:
    shape = Pipelining("1f1b", 2, 2)
    orders = [list(order) for order in shape.orders()]
    orders[0] = list(map(Action.parse, ["0F0", "0B0", "0F1", "0B1"]))
    orders[1] = list(map(Action.parse, ["1F0", "1F1", "1B0", "1B1"]))
    with pytest.raises(UnprovenProgram) as error:
        verify_schedule(shape, orders)
    text = str(error.value)
    assert "0B0 waits for 1B0: stage 1 sends the gradient" in text
    assert "1B0 waits for 1F1: rank 1 runs it first" in text
    assert "1F1 waits for 0F1: stage 0 sends its activations" in text
    assert "0F1 waits for 0B0: rank 0 runs it first" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda order: order[:-1], "expected one F, and one B"),
        (lambda order: [*order, order[0]], "expected one F, and one B"),
        (lambda order: [*order, Action(1, "F", 0)], "a stage that it does not hold"),
        (lambda order: [*order, Action(0, "F", 9)], "microbatches that there are not"),
    ],
)
def test_passes_that_are_missing_doubled_or_elsewhere_are_refused(change: object, said: str) -> None:
    shape = Pipelining("1f1b", 2, 4)
    first, second = shape.orders()
    with pytest.raises(UnprovenProgram, match=said):
        verify_schedule(shape, [change(list(first)), second])  # type: ignore[operator]


def test_a_forward_after_its_own_backward_is_refused() -> None:
    shape = Pipelining("zb-h1", 2, 4)
    refused = 0
    for rank, order in enumerate(shape.orders()):
        for place in range(len(order) - 1):
            swapped = [list(one) for one in shape.orders()]
            swapped[rank][place], swapped[rank][place + 1] = order[place + 1], order[place]
            first, second = order[place], order[place + 1]
            if (first.stage, first.microbatch) != (second.stage, second.microbatch):
                continue
            with pytest.raises(UnprovenProgram, match="stands still for ever"):
                verify_schedule(shape, swapped)
            refused += 1
    assert refused


def test_losses_out_of_order_are_refused() -> None:
    shape = Pipelining("gpipe", 2, 2)
    first, second = shape.orders()
    forward, later, *rest = second
    with pytest.raises(UnprovenProgram, match=r"stage 1, the last one, runs microbatches \[1, 0\] forward"):
        verify_schedule(shape, [first, (later, forward, *rest)])


def test_other_orders_without_a_cycle_are_accepted() -> None:
    shape = Pipelining("gpipe", 2, 2)
    first, second = shape.orders()
    verify_schedule(shape, [[*first[:2], *reversed(first[2:])], [*second[:2], *reversed(second[2:])]])
