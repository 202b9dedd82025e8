"""Pipeline schedules: which rank holds which stage, and what every rank does in which order.

An action is one pass of one microbatch through one stage, spelt as in ``torch.distributed.pipelining``:

    2F0   stage 2, forward, microbatch 0
    2B0   its whole backward
    2I0   its backward to the stage's inputs alone, so that the stage before can go on;  2W0  the rest: weights

    schedule      virtual stages  placement  backward   microbatches
    naive         1               loop       B          any; one at a time crosses all stages and comes back
    gpipe         1               loop       B          any
    1f1b          1               loop       B          any
    interleaved   2 or more       loop       B          any; in rounds, of which the first may have one more
    zb-h1         1 or more       loop       I, W       as interleaved, if there are virtual stages
    zb-2p         1               loop       I, W       any
    zb-v          2               v          I, W       any
    dualpipe-v    2               v          B, I, W    at least 2 P
    found         1 or more       loop or v  I, W       any; the order is found for how long passes take (``PassTimes``)

Of P ranks, a loop places stage s on rank s mod P. A v turns at the last rank: stages 0 to P - 1 on ranks 0 to P - 1,
the rest back from P - 1 to 0. Stages next to each other on one rank pass tensors without sending.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import starmap
from typing import Literal, NamedTuple, get_args

import numpy as np

from autopar.ir.errors import InvalidPlan
from autopar.ir.list_scheduling import PassTimes, list_schedule

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "found"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_IN_A_V = ("zb-v", "dualpipe-v")


class Action(NamedTuple):
    """One pass of one microbatch through one stage. A tuple, because a simulation makes many thousands."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` printed. Raises InvalidPlan."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise InvalidPlan(f"{text!r} is not a pipeline action; expected stage, F, B, I or W, microbatch: '2F0'")
        return cls(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]  # the pattern admits kinds only


Order = tuple[Action, ...]


def work_of(action: Action) -> Kind | None:
    """What an action computes. The first stage sends no gradient back: of a split backward its input-gradient pass has
    nothing to do, and its weight-gradient pass is a whole backward."""
    if action.stage or action.kind in ("F", "B"):
        return action.kind
    return "B" if action.kind == "W" else None


@dataclass(frozen=True, slots=True)
class Pipelining:
    """A schedule for ``num_ranks`` ranks (of one place in each stage), with ``virtual_stages`` stages on each.

    passes, turns: of schedule ``found``: what its order is found for, and whether its stages are placed in a v.
    """

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 1
    passes: PassTimes | None = None
    turns: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones included."""
        return self.num_ranks * self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes leave the weights for later."""
        return splits_backward(self.schedule)

    @property
    def in_a_v(self) -> bool:
        """Whether stages are placed in a v, and not in a loop."""
        return self.schedule in _IN_A_V or self.turns

    def obstacle(self) -> str | None:
        """Why there is no such schedule, with what to try; None if there is."""
        ranks, count, virtual = self.num_ranks, self.num_microbatches, self.virtual_stages
        if self.schedule not in SCHEDULES:
            return f"unknown schedule {self.schedule!r}; known: {', '.join(SCHEDULES)}"
        least, most = virtual_stages_of(self.schedule)
        if virtual < least or (most is not None and virtual > most):
            wanted = f"{least}" if most == least else f"at least {least}"
            return f"{self.schedule} has {wanted} virtual stages a rank, not {virtual}.\n  try: virtual_stages={least}"
        if self.schedule == "found" or self.passes is not None or self.turns:
            return self._obstacle_of_passes()
        if ranks == 1 < virtual:
            return f"{virtual} virtual stages need a pipeline of 2 ranks or more.\n  try: virtual_stages=1"
        if self.schedule == "dualpipe-v" and count < 2 * ranks:
            return (
                f"dualpipe-v on {ranks} ranks needs {2 * ranks} microbatches or more, not {count}.\n"
                f"  try: num_microbatches={2 * ranks}, or zb-v"
            )
        return None

    def _obstacle_of_passes(self) -> str | None:
        if self.schedule != "found":
            return f"{self.schedule} has an order of its own; an order of passes is found for schedule found alone."
        if self.passes is None:
            return (
                "the order of found is found for how long passes take, and none is given.\n  try: a search finds them"
            )
        if self.turns and self.virtual_stages != 2:
            return f"stages in a v are 2 a rank, not {self.virtual_stages}.\n  try: placement: loop"
        for name, expected in (
            *dict.fromkeys(("forward", "inputs", "weights"), self.num_stages).items(),
            *dict.fromkeys(("alive", "waiting"), self.num_ranks).items(),
        ):
            given = getattr(self.passes, name)
            if len(given) != expected or min(given) < 1:
                return f"passes.{name} has {len(given)} values from {min(given)} on, expected {expected} of 1 or more."
        return None

    def check(self) -> None:
        """Raise InvalidPlan if there is no such schedule."""
        obstacle = self.obstacle()
        if obstacle is not None:
            raise InvalidPlan(f"schedule: {obstacle}")

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        lap, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.in_a_v and lap % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of ``rank``, in order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def orders(self) -> tuple[Order, ...]:
        """The actions of every rank, in order. Raises InvalidPlan if there is no such schedule."""
        return _orders(self)

    def live(self) -> tuple[int, ...]:
        """Per stage, the most microbatches between their forward and the end of their backward."""
        return _live(self)

    def waiting(self) -> tuple[int, ...]:
        """Per stage, how many of those have only the gradients of weights left when its rank has most microbatches in
        all its stages. None in the first stage, whose weight-gradient pass is its whole backward (``work_of``)."""
        return _waiting(self)


def splits_backward(schedule: str) -> bool:
    """Whether ``schedule`` has backward passes that leave the weights for later."""
    return schedule in ("zb-h1", "zb-2p", "found", *_IN_A_V)


def virtual_stages_of(schedule: str) -> tuple[int, int | None]:
    """Least and most stages a rank (None: no limit) of ``schedule``."""
    if schedule in _IN_A_V:
        return 2, 2
    return {"interleaved": (2, None), "zb-h1": (1, None), "found": (1, None)}.get(schedule, (1, 1))


# Rounds of as many microbatches as ranks, after which more of them change nothing but the length of a step.
STEADY_ROUNDS = 2
# ZB-2p has memory for twice as many microbatches as the first rank of 1F1B.
_ZB_2P_ALIVE = 2


@lru_cache(maxsize=256)
def _orders(shape: Pipelining) -> tuple[Order, ...]:
    shape.check()
    made_by: dict[str, Callable[[Pipelining, int], Iterator[Action]]] = {
        "zb-v": _zb_v,
        "zb-2p": _listed,
        "found": _listed,
        "dualpipe-v": _dualpipe_v,
        "interleaved": _looped,
        "zb-h1": _looped,
    }
    make = made_by.get(shape.schedule, _plain)
    return tuple(tuple(make(shape, rank)) for rank in range(shape.num_ranks))


@lru_cache(maxsize=1024)
def _live(shape: Pipelining) -> tuple[int, ...]:
    ranks, count = shape.num_ranks, shape.num_microbatches
    if shape.schedule == "found":
        return _counted(shape)[0]
    # Rounds through virtual stages in a loop are longer where ranks do not divide the microbatches.
    alike = count % ranks == 0 or shape.virtual_stages == 1 or shape.schedule in _IN_A_V
    if shape.schedule != "gpipe" and count > STEADY_ROUNDS * ranks and alike:
        return _live(replace(shape, num_microbatches=STEADY_ROUNDS * ranks))
    shape.check()
    if shape.schedule in ("interleaved", "zb-h1"):
        return _live_in_a_loop(shape)
    if shape.schedule in _IN_A_V:
        # On the way down a rank runs ahead until the first microbatch is back; what comes up leaves at once.
        down = [min(count, 2 * ranks - rank) for rank in range(ranks)]
        return *down, *(min(count, rank + 1) for rank in reversed(range(ranks)))
    if shape.schedule == "zb-2p":
        return (min(count, _ZB_2P_ALIVE * shape.num_ranks),) * ranks
    return tuple(_filling(shape, rank) for rank in range(ranks))


def _plain(shape: Pipelining, rank: int) -> Iterator[Action]:
    """Some forwards to fill the pipeline, then a backward and a forward in turn, then the rest.

    naive fills with one, gpipe with all; 1f1b with as many as there are stages from this one on.
    """
    count, ahead = shape.num_microbatches, _filling(shape, rank)
    for microbatch in range(ahead):
        yield Action(rank, "F", microbatch)
    for microbatch in range(count):
        yield Action(rank, "B", microbatch)
        if ahead + microbatch < count:
            yield Action(rank, "F", ahead + microbatch)


@lru_cache(maxsize=1024)
def _waiting(shape: Pipelining) -> tuple[int, ...]:
    if not shape.splits_backward:
        return (0,) * shape.num_stages
    steady = STEADY_ROUNDS * shape.num_ranks
    if shape.num_microbatches > steady and not _rounds(shape)[1]:
        return _waiting(replace(shape, num_microbatches=steady))
    _, (_, *waiting) = _counted(shape)
    return 0, *waiting


def _counted(shape: Pipelining) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``live`` and ``waiting`` of the stages, by their actions."""
    live, found = [0] * shape.num_stages, [0] * shape.num_stages
    for order in shape.orders():
        now, waiting, total, most = Counter[int](), Counter[int](), (0, 0), (0, 0)
        for stage, kind, _ in order:
            now[stage] += (kept := {"F": 1, "I": 0}.get(kind, -1))
            waiting[stage] += (delayed := {"I": 1, "W": -1}.get(kind, 0))
            live[stage], total = max(live[stage], now[stage]), (total[0] + kept, total[1] + delayed)
            if total > most:
                most = total
                for own, count in waiting.items():
                    found[own] = count
    return tuple(live), tuple(found)


def _filling(shape: Pipelining, rank: int) -> int:
    """Forwards before the first backward of ``_plain``."""
    count = shape.num_microbatches
    return {"naive": 1, "gpipe": count, "1f1b": min(count, shape.num_ranks - rank)}[shape.schedule]


def _looped(shape: Pipelining, rank: int) -> Iterator[Action]:
    """Rounds of microbatches through one chunk after another: interleaved 1F1B, and ZB-H1 (ZB1P).

    Narayanan et al., arXiv:2104.04473, and Qi et al., arXiv:2401.10241; the order is that of torch's
    ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble, of which ZB-H1 is the case of one stage a rank.
    Weight gradients of ZB-H1 lag ``rank`` backwards behind, which keeps as many microbatches alive on every rank.
    """
    ranks, virtual = shape.num_ranks, shape.virtual_stages
    split = shape.splits_backward

    def chunks(backward: bool) -> list[tuple[int, int]]:
        seen = [0] * virtual
        found = []
        for chunk in _chunks(shape):
            own = virtual - 1 - chunk if backward else chunk
            found.append((own * ranks + rank, seen[own]))
            seen[own] += 1
        return found

    forwards, backwards = chunks(False), chunks(True)
    total = len(forwards)
    ahead = min(_looped_filling(shape, rank), total)
    for stage, microbatch in forwards[:ahead]:
        yield Action(stage, "F", microbatch)
    for step, (stage, microbatch) in enumerate(backwards):
        if ahead + step < total:
            yield Action(forwards[ahead + step][0], "F", forwards[ahead + step][1])
        yield Action(stage, "I" if split else "B", microbatch)
        if split and step >= rank:
            yield Action(backwards[step - rank][0], "W", backwards[step - rank][1])
    if split:
        for stage, microbatch in backwards[max(0, total - rank) :]:
            yield Action(stage, "W", microbatch)


def _rounds(shape: Pipelining) -> tuple[int, int, int]:
    """Rounds in which microbatches go through one chunk after another, how many of the first have one more, and what
    the others have."""
    number = max(1, shape.num_microbatches // shape.num_ranks) if shape.virtual_stages > 1 else 1
    size, larger = divmod(shape.num_microbatches, number)
    return number, larger, size


def _chunks(shape: Pipelining) -> list[int]:
    """The chunk of each forward of a rank, in order."""
    number, larger, size = _rounds(shape)
    return [n for turn in range(number) for n in range(shape.virtual_stages) for _ in range(size + (turn < larger))]


def _looped_filling(shape: Pipelining, rank: int) -> int:
    """Forwards before the first backward of ``_looped``, if there are as many."""
    each = 1 if shape.splits_backward else 2
    _, larger, size = _rounds(shape)
    return (shape.virtual_stages - 1) * (size + (larger > 0)) + each * (shape.num_ranks - 1 - rank)


def _live_in_a_loop(shape: Pipelining) -> tuple[int, ...]:
    """``live`` of ``_looped``: after the n-th forward of a rank, n less its lead have been backward."""
    ranks, virtual = shape.num_ranks, shape.virtual_stages
    chunk = np.array(_chunks(shape))
    lag = [rank if shape.splits_backward else 0 for rank in range(ranks)]
    lead = np.array([_looped_filling(shape, rank) + lag[rank] for rank in range(ranks)])
    peaks = []
    for own in range(virtual):
        number = np.flatnonzero(chunk == own)
        ended = np.concatenate([[0], np.cumsum(virtual - 1 - chunk == own)])
        begun = np.arange(1, len(number) + 1)
        peaks.append((begun[:, None] - ended[np.maximum(0, number[:, None] - lead)]).max(axis=0))
    return tuple(int(peak) for own_peaks in peaks for peak in own_peaks)


def _listed(shape: Pipelining, rank: int) -> Iterator[Action]:
    """By list scheduling: ZB-2p of Qi et al., arXiv:2401.10241, or for the passes that are given."""
    count = shape.num_microbatches
    passes = shape.passes or PassTimes.equal(shape.num_ranks, count, _ZB_2P_ALIVE * shape.num_ranks)
    ranks = tuple(map(shape.rank_of, range(shape.num_stages)))
    return starmap(Action, list_schedule(ranks, count, passes)[rank])


class _Counter:
    """Actions of two stages in order of microbatch; those beyond the last microbatch are left out."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done: dict[tuple[int, Kind], int] = {}

    def next(self, stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            microbatch = self.done.get((stage, kind), 0)
            self.done[stage, kind] = microbatch + 1
            if microbatch < self.count:
                yield Action(stage, kind, microbatch)


def _zb_v(shape: Pipelining, rank: int) -> Iterator[Action]:
    """ZB-V of Qi et al., arXiv:2405.15362, in the order of torch's ScheduleZBVZeroBubble."""
    ranks = shape.num_ranks
    down, up = rank, 2 * ranks - 1 - rank
    # The order is that of a full pipeline; microbatches that there are not drop out of it.
    full = max(2 * ranks - 1, shape.num_microbatches)
    counter = _Counter(shape.num_microbatches)
    take, done = counter.next, counter.done
    for _ in range(2 * (ranks - rank) - 1):
        yield from take(down, "F")
    for _ in range(rank):
        yield from take(up, "F")
        yield from take(down, "F")
    for _ in range(ranks - rank):
        yield from take(up, "F", "I", "W")
    while done[up, "F"] < done[down, "F"] or done[down, "F"] < full:
        if done[down, "F"] < full:
            yield from take(down, "F")
        yield from take(down, "I", "W")
        yield from take(up, "F", "I", "W")
    for _ in range(rank):
        yield from take(down, "I")
        yield from take(up, "I")
    for _ in range(ranks - rank):
        yield from take(down, "I", "W")
    for stage in (up, down):
        while done.get((stage, "W"), 0) < full:
            yield from take(stage, "W")


def _dualpipe_v(shape: Pipelining, rank: int) -> Iterator[Action]:
    """DualPipeV of DeepSeek-AI, arXiv:2412.19437, in the order of torch's ScheduleDualPipeV.

    Where torch has an overlapped pair, here the forward comes first and the backward after it.
    """
    ranks, count = shape.num_ranks, shape.num_microbatches
    down, up = rank, 2 * ranks - 1 - rank
    forwards, backwards = {down: 0, up: 0}, {down: 0, up: 0}
    waiting: list[tuple[int, int]] = []

    def forward(stage: int) -> Action:
        forwards[stage] += 1
        return Action(stage, "F", forwards[stage] - 1)

    def backward(stage: int, *, split: bool = False) -> Action:
        backwards[stage] += 1
        if split:
            waiting.append((stage, backwards[stage] - 1))
        return Action(stage, "I" if split else "B", backwards[stage] - 1)

    def weights() -> Iterator[Action]:
        if waiting:
            stage, microbatch = waiting.pop(0)
            yield Action(stage, "W", microbatch)

    for _ in range(2 * (ranks - 1 - rank)):
        yield forward(down)
    for _ in range(rank + 1):
        yield forward(down)
        yield forward(up)
    for _ in range(ranks - 1 - rank):
        yield backward(up, split=True)
        yield from weights()
        yield forward(up)
    for _ in range(count - 2 * ranks + rank + 1):
        yield forward(down)
        yield backward(up)
        yield forward(up)
        yield backward(down)
    for _ in range(ranks - 1 - rank):
        yield backward(up)
        yield forward(up)
        yield backward(down)
    # The second half of the last backwards leaves the weights for the time when the pipeline drains.
    half = (rank + 1) // 2
    for step in range(rank + 1):
        yield backward(up, split=step > half or (step == half and rank % 2 == 1))
        yield backward(down, split=step >= half)
    for _ in range(ranks - 1 - rank):
        yield from weights()
        yield backward(down, split=True)
    for _ in range(rank + 1):
        yield from weights()
