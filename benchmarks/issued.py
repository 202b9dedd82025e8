"""What the ranks of a job really send in a training step, against the records of its placed model.

Collectives between ops, inside them and between stages have to agree one by one: kind, pass, ranks, bytes, how often.
What travels in buckets (gradients) or units (parameters under ZeRO) has to agree in bytes by kind and ranks. Rows that
tokens send to experts have to agree in number on each rank, and in bytes on all ranks together.

A schedule that splits backwards may send more: where a branch of the graph that no input of the stage reaches holds
weights of both passes, its collectives run in both (``runtime/split_backward.py``). That is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isclose
from typing import NamedTuple

import torch.distributed as dist

import autopar
from autopar.ir.placed.placed_model import PlacedModel, place_captured
from autopar.ir.placed.records import Record
from autopar.ir.placed.stage_communication import PIPELINE_AXIS
from autopar.ir.placed.step_communication import step_communication
from autopar.ir.plan import Plan
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.ir.torch_private import process_group

_IN_BULK = ("gradient", "parameter", "loss")
MORE = "more, "
Ranks = tuple[int, ...]


class Sent(NamedTuple):
    """One collective that a rank took part in, or one send, to ``ranks``. phase: None where it is not known."""

    kind: str
    phase: str | None
    ranks: Ranks
    payload_bytes: float


class Place(NamedTuple):
    """A rank: its place in the pipeline, and its coordinates on the mesh of a stage."""

    pipeline_rank: int
    coordinates: tuple[int, ...]


def place_of(placed: PlacedModel, rank: int) -> Place:
    """Where ``rank`` stands; the pipeline is outermost."""
    coordinates = []
    for size in reversed(placed.mesh.sizes):
        rank, own = divmod(rank, size)
        coordinates.insert(0, own)
    return Place(rank, tuple(coordinates))


@dataclass(slots=True)
class Expected:
    """What one rank has to send. single: of each collective how often; rows: likewise, of any size; bulk: bytes."""

    single: Counter[tuple[str, str | None, Ranks, float]] = field(default_factory=Counter)
    rows: Counter[tuple[str, str | None, Ranks]] = field(default_factory=Counter)
    row_bytes: Counter[tuple[str, str | None, Ranks]] = field(default_factory=Counter)
    bulk: Counter[tuple[str, Ranks]] = field(default_factory=Counter)


def expected_of(placed: PlacedModel, records: Iterable[Record], rank: int, *, phases: bool) -> Expected:
    """phases: whether what is sent says in which pass it was."""
    found, place, rank_of = Expected(), place_of(placed, rank), placed.plan.pipelining.rank_of
    for record in records:
        # Of a send the first stage sends; both hear of it.
        own = record.stages[:1] if record.kind == "send" and record.cause == "stage" else record.stages
        if place.pipeline_rank not in map(rank_of, own):
            continue
        if record.cause == "stage":
            ranks: Ranks = (_rank(placed, Place(rank_of(record.stages[1]), place.coordinates)),)
            found.single[record.kind, None, ranks, record.payload_bytes] += record.times
            continue
        ranks, phase = _ranks(placed, record, place), record.phase if phases else None
        if record.kind == "send":
            ranks = ()  # which of the two neighbours, the ring knows
        if record.cause in _IN_BULK:
            found.bulk[record.kind, ranks] += record.times * round(record.payload_bytes)
        elif record.rows:
            found.rows[record.kind, phase, ranks] += record.times
            found.row_bytes[record.kind, phase, ranks] += record.times * record.payload_bytes  # type: ignore[assignment]
        else:
            found.single[record.kind, phase, ranks, record.payload_bytes] += record.times
    return found


def _rank(placed: PlacedModel, place: Place) -> int:
    number = place.pipeline_rank
    for own, size in zip(place.coordinates, placed.mesh.sizes, strict=True):
        number = number * size + own
    return number


def _ranks(placed: PlacedModel, record: Record, place: Place) -> Ranks:
    """The ranks that take part with the one at ``place``."""
    places = [place.coordinates]
    for axis in record.axes:
        if axis != PIPELINE_AXIS:
            number, size = placed.mesh.index(axis), placed.mesh.sizes[placed.mesh.index(axis)]
            places = [(*p[:number], own, *p[number + 1 :]) for p in places for own in range(size)]
    pipeline = {place.pipeline_rank}
    if PIPELINE_AXIS in record.axes:
        pipeline = set(map(placed.plan.pipelining.rank_of, record.stages))
    return tuple(sorted({_rank(placed, Place(rank, own)) for rank in pipeline for own in places}))


def differences(expected: Expected, sent: Iterable[Sent]) -> tuple[list[str], Counter[tuple[str, str | None, Ranks]]]:
    """In words what one rank sent and should not have, or should and did not; and the bytes of rows that it sent."""
    single: Counter[tuple[str, str | None, Ranks, float]] = Counter()
    rows: Counter[tuple[str, str | None, Ranks]] = Counter()
    row_bytes: Counter[tuple[str, str | None, Ranks]] = Counter()
    bulk: Counter[tuple[str, Ranks]] = Counter()
    for one in sent:
        keys = [(one.kind, phase, ranks) for phase in (one.phase, None) for ranks in (one.ranks, ())]
        exact = next((k for k in ((*k, one.payload_bytes) for k in keys) if single[k] < expected.single[k]), None)
        if exact is not None:
            single[exact] += 1
        elif (key := next((k for k in keys if rows[k] < expected.rows[k]), None)) is not None:
            rows[key] += 1
            row_bytes[key] += round(one.payload_bytes)
        else:
            bulk[one.kind, one.ranks] += round(one.payload_bytes)
    found = [
        *_unequal(expected.single, single, "times"),
        *_unequal(expected.rows, rows, "times, of rows"),
        *_unequal(expected.bulk, bulk, "bytes in all"),
    ]
    return found, row_bytes


def _unequal(
    expected: Mapping[tuple[object, ...], int], got: Mapping[tuple[object, ...], int], unit: str
) -> Iterator[str]:
    for key in dict.fromkeys((*expected, *got)):
        if expected.get(key, 0) != got.get(key, 0):
            what = " ".join(str(part) for part in key if part is not None)
            more = MORE if got.get(key, 0) > expected.get(key, 0) else ""
            yield f"{what}: recorded {expected.get(key, 0)} {unit}, issued {more}{got.get(key, 0)}"


@contextmanager
def compared(parallel: autopar.ParallelModule, found: list[str], plan: Plan | None = None) -> Iterator[None]:
    """Within it all ranks make one training step; ``found`` then says where it differs from the records, on any rank.

    Not the first step, in which buckets of gradients are laid out. plan: that is recorded, if not that of ``parallel``.
    """
    placed = place_captured(parallel.engine.captured, plan or parallel.plan)
    records = step_communication(placed)
    with CollectiveCounter() as counter:
        yield
    agreement = parallel.engine.accord.group_name
    sent = []
    for one in counter.select():
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group(one.group))))
        if one.kind == "recv" or one.group == agreement or len(ranks) == 1:
            continue
        if one.peer is not None:
            ranks = (dist.get_global_rank(process_group(one.group), one.peer),)
        sent.append(Sent(one.kind, one.phase, ranks, float(one.payload_bytes)))
    expected = expected_of(placed, records, dist.get_rank(), phases=True)
    own, row_bytes = differences(expected, sent)
    every: list[tuple[list[str], Counter[tuple[str, str | None, Ranks]], Counter[tuple[str, str | None, Ranks]]]]
    every = [([], Counter(), Counter())] * dist.get_world_size()
    dist.all_gather_object(every, (own, row_bytes, expected.row_bytes))
    found += [f"rank {rank}: {text}" for rank, (texts, _, _) in enumerate(every) for text in texts]
    capped = parallel.plan.expert_capacity is not None
    found += _unequal_rows([sums for _, sums, _ in every], [sums for _, _, sums in every], capped=capped)


def _unequal_rows(
    sent: Sequence[Counter[tuple[str, str | None, Ranks]]],
    expected: Sequence[Counter[tuple[str, str | None, Ranks]]],
    *,
    capped: bool,
) -> Iterator[str]:
    """capped: experts drop rows beyond their capacity, so that fewer may travel."""
    total, goal = (sum(sum(own.values()) for own in every) for every in (sent, expected))
    if total > goal * 1.0001 if capped else not isclose(total, goal, rel_tol=1e-6):
        yield f"rows of all ranks: recorded {goal} bytes, issued {total}"
