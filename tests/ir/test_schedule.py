"""Orders equal those of torch's schedules, and hold as many microbatches as is known."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from autopar.ir.errors import InvalidPlan
from autopar.ir.pairs import paired
from autopar.ir.schedule import SCHEDULES, Action, Kind, Pipelining, Schedule


def shapes(*names: Schedule) -> st.SearchStrategy[Pipelining]:
    """Every schedule that there is for some ranks, microbatches and virtual stages."""
    made = st.builds(
        Pipelining, st.sampled_from(names or SCHEDULES), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4)
    )
    return made.filter(lambda shape: shape.obstacle() is None)


def text(shape: Pipelining, rank: int) -> str:
    return " ".join(map(str, shape.orders()[rank]))


def test_action_text_parses_back() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    for kind in get_args(Kind):
        assert Action.parse(f"12{kind}31") == Action(12, kind, 31)
    with pytest.raises(InvalidPlan, match="'2X0' is not a pipeline action"):
        Action.parse("2X0")


def test_golden() -> None:
    assert text(Pipelining("naive", 2, 2), 0) == "0F0 0B0 0F1 0B1"
    assert text(Pipelining("gpipe", 2, 3), 1) == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert text(Pipelining("1f1b", 3, 4), 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text(Pipelining("1f1b", 3, 4), 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert text(Pipelining("1f1b", 3, 4), 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert text(Pipelining("interleaved", 2, 2, 2), 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert text(Pipelining("interleaved", 2, 3, 2), 1) == "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2"
    assert text(Pipelining("zb-h1", 2, 3), 1) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert text(Pipelining("zb-2p", 2, 5), 0) == "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4"
    assert text(Pipelining("zb-2p", 2, 5), 1) == "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1F4 1I4 1W1 1W2 1W3 1W4"
    assert text(Pipelining("zb-v", 2, 1, 2), 0) == "0F0 3F0 3I0 3W0 0I0 0W0"


class _Stage:
    """What torch's schedules ask of a stage; notes the passes of those that only run as they go."""

    def __init__(self, shape: Pipelining, rank: int, index: int) -> None:
        self.group_size, self.group_rank = shape.num_ranks, rank
        self.num_stages, self.stage_index = shape.num_stages, index
        self.is_last, self.has_backward, self.submod = False, True, None
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def nothing(self, *_: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = nothing


@given(shapes("gpipe", "1f1b"))
def test_single_stage_orders_equal_what_torch_runs(shape: Pipelining) -> None:
    if shape.schedule == "1f1b" and shape.num_microbatches < shape.num_ranks:
        return  # torch refuses; ours is the same order cut short
    make = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}[shape.schedule]
    for rank in range(shape.num_ranks):
        stage: Any = _Stage(shape, rank, rank)
        schedule: Any = make(stage, shape.num_microbatches)
        schedule._initialize_stage = lambda *_: None
        empty: list[Any] = [()] * shape.num_microbatches
        schedule._step_microbatches(empty, [{}] * shape.num_microbatches)
        assert " ".join(stage.ran) == text(shape, rank)


TORCH = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zb-h1": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}


@pytest.mark.parametrize("name", TORCH)
def test_multi_stage_orders_equal_torch(name: Schedule) -> None:
    """For every shape that torch has, of pairs that it overlaps the forward first; we have no shapes less, and those in
    rounds of other sizes that torch has not."""
    compared = 0
    for ranks, count, virtual in itertools.product(range(2, 5), range(1, 14), range(1, 4)):
        shape = Pipelining(name, ranks, count, virtual)
        if name == "interleaved" and virtual == 1:
            continue  # torch's is a 1F1B with a longer warm-up
        stages: Any = [_Stage(shape, 0, index) for index in range(virtual)]
        try:
            made = TORCH[name](stages, count, loss_fn=lambda output, target: output)
        except ValueError:
            uneven = not shape.in_a_v and count % max(1, count // ranks)
            assert (name == "zb-h1" and virtual == 1) or uneven or shape.obstacle() is not None
            continue
        for rank, order in made.pipeline_order.items():
            flat = [str(a) for action in order if action is not None for a in action.sub_actions or (action,)]
            assert " ".join(flat) == text(shape, rank)
            at_once = {tuple(map(str, action.sub_actions)) for action in order if action and action.sub_actions}
            pairs = {tuple(map(str, own)) for own in paired(shape.orders()[rank]) if len(own) == 2}
            assert at_once <= pairs or name != "dualpipe-v"
        assert made.stage_index_to_group_rank == {s: shape.rank_of(s) for s in range(shape.num_stages)}
        compared += 1
    assert compared >= 13


@given(shapes())
def test_every_microbatch_passes_every_stage_once(shape: Pipelining) -> None:
    for rank, order in enumerate(shape.orders()):
        assert {action.stage for action in order} == set(shape.stages_of(rank))
        assert len(set(order)) == len(order)
    actions = {action for order in shape.orders() for action in order}
    for stage, microbatch in itertools.product(range(shape.num_stages), range(shape.num_microbatches)):
        kinds = {kind for kind in get_args(Kind) if Action(stage, kind, microbatch) in actions}
        assert kinds == {"F", "B"} or (shape.splits_backward and kinds == {"F", "I", "W"})


@given(shapes())
def test_live_microbatches_are_those_of_the_orders(shape: Pipelining) -> None:
    """Also of many rounds, which keep no more than a few."""
    for tried in (shape, replace(shape, num_microbatches=9 * shape.num_ranks)):
        if tried.obstacle() is not None:
            continue
        live = [0] * tried.num_stages
        for order in tried.orders():
            now = Counter[int]()
            for stage, kind, _ in order:
                now[stage] += {"F": 1, "I": 0}.get(kind, -1)
                live[stage] = max(live[stage], now[stage])
        assert tried.live() == tuple(live)


@given(shapes())
def test_live_microbatches(shape: Pipelining) -> None:
    ranks, count = shape.num_ranks, shape.num_microbatches
    if shape.schedule == "naive":
        assert shape.live() == (1,) * ranks
    elif shape.schedule == "gpipe":
        assert shape.live() == (count,) * ranks
    elif shape.schedule == "1f1b":
        assert shape.live() == tuple(min(count, ranks - i) for i in range(ranks))
    elif shape.schedule == "zb-2p":
        # Twice as many as on the first rank of 1F1B.
        assert shape.live() == (min(count, 2 * ranks),) * ranks
    elif shape.virtual_stages == 1:
        assert max(shape.live()) <= min(count, ranks), "ZB-H1 holds no more than the first stage of 1F1B"
    elif shape.schedule in ("zb-v", "dualpipe-v"):
        # Stages are half as large.
        for rank in range(ranks):
            assert sum(shape.live()[s] for s in shape.stages_of(rank)) <= 2 * ranks + 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Pipelining("zb", 2, 4), "unknown schedule 'zb'; known: naive, gpipe, 1f1b, interleaved"),  # type: ignore[arg-type]
        (Pipelining("1f1b", 2, 4, 2), "1f1b has 1 virtual stages a rank, not 2.\n  try: virtual_stages=1"),
        (Pipelining("zb-2p", 2, 4, 2), "zb-2p has 1 virtual stages a rank, not 2.\n  try: virtual_stages=1"),
        (Pipelining("interleaved", 2, 4), "interleaved has at least 2 virtual stages a rank, not 1"),
        (Pipelining("zb-v", 2, 4, 3), "zb-v has 2 virtual stages a rank, not 3"),
        (Pipelining("interleaved", 1, 4, 2), "2 virtual stages need a pipeline of 2 ranks or more"),
        (Pipelining("dualpipe-v", 4, 7, 2), "needs 8 microbatches or more, not 7.\n  try: num_microbatches=8"),
    ],
)
def test_shapes_that_there_are_not(shape: Pipelining, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        shape.orders()


def test_placement() -> None:
    loop, turned = Pipelining("interleaved", 3, 3, 2), Pipelining("zb-v", 3, 3, 2)
    assert [loop.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [turned.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
