"""What a rank sends in a training step, against the records of its placed model.

Collectives between ops, inside them and between stages have to agree one by one: kind, pass, ranks, bytes, how often.
What travels in buckets (gradients) or units (parameters under ZeRO) has to agree in bytes by kind and ranks. What
dispatches tokens to experts has to agree in number; its bytes agree on all ranks together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.checking.ranks import RankTrace
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.records import PIPELINE_AXIS, Record
from autopar.ir.precision import itemsize_of

_IN_BULK = ("gradient", "parameter", "loss")
Ranks = tuple[int, ...]


class Sent(NamedTuple):
    """One collective that a rank took part in, or one send, to ``ranks``.

    phase: None where it is not known. narrow_bytes: of the same payload in the dtype of compute. Records know the
    captured dtype alone, so what a model computes in float32 on purpose (a router's softmax) is recorded as narrow.
    """

    kind: str
    phase: str | None
    ranks: Ranks
    payload_bytes: float
    narrow_bytes: float | None = None


class Place(NamedTuple):
    """A rank: its place in the pipeline, and its coordinates on the mesh of a stage."""

    pipeline_rank: int
    coordinates: tuple[int, ...]


def place_of(placed: PlacedModel, rank: int) -> Place:
    """Where ``rank`` stands; the pipeline is outermost."""
    coordinates: list[int] = []
    for size in reversed(placed.mesh.sizes):
        rank, own = divmod(rank, size)
        coordinates.insert(0, own)
    return Place(rank, tuple(coordinates))


@dataclass(slots=True)
class Expected:
    """What one rank has to send.

    single: how often it takes part in each collective. dispatched: likewise in the dispatch of tokens, of any size;
    dispatched_bytes: in all, the mean over ranks. bulk: bytes by kind and ranks.
    """

    single: Counter[tuple[str, str | None, Ranks, float]] = field(default_factory=Counter)
    dispatched: Counter[tuple[str, str | None, Ranks]] = field(default_factory=Counter)
    dispatched_bytes: float = 0.0
    bulk: Counter[tuple[str, Ranks]] = field(default_factory=Counter)


def expected_of(placed: PlacedModel, records: Iterable[Record], rank: int, *, phases: bool) -> Expected:
    """What the records ask of ``rank``. phases: whether what is sent says in which pass it was."""
    found, place, rank_of = Expected(), place_of(placed, rank), placed.plan.pipelining.rank_of
    for record in records:
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
        elif record.dispatch and record.kind == "all_to_all":  # what is counted before has a size that is known
            found.dispatched[record.kind, phase, ranks] += record.times
            found.dispatched_bytes += record.times * record.payload_bytes
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


def differences(expected: Expected, sent: Iterable[Sent]) -> tuple[list[str], float]:
    """In words what one rank sent and should not have, or should and did not; and the bytes that dispatched tokens."""
    single: Counter[tuple[str, str | None, Ranks, float]] = Counter()
    dispatched: Counter[tuple[str, str | None, Ranks]] = Counter()
    num_bytes = 0.0
    bulk: Counter[tuple[str, Ranks]] = Counter()
    # The largest first, so that none takes the place of a narrower one.
    for one in sorted(sent, key=lambda one: -one.payload_bytes):
        if _counted(one, one.payload_bytes, expected, single):
            continue
        if one.narrow_bytes is not None and _counted(one, one.narrow_bytes, expected, single):
            continue
        if (key := next((k for k in _keys(one) if dispatched[k] < expected.dispatched[k]), None)) is not None:
            dispatched[key] += 1
            num_bytes += one.payload_bytes
        else:
            bulk[one.kind, one.ranks] += round(one.payload_bytes)
    found = [
        *_unequal(expected.single, single, "times"),
        *_unequal(expected.dispatched, dispatched, "times, of tokens"),
        *_unequal(expected.bulk, bulk, "bytes in all"),
    ]
    return found, num_bytes


def _keys(one: Sent) -> Iterator[tuple[str, str | None, Ranks]]:
    """By which records may know it: those of a pass or of both, those whose ranks are known or not."""
    yield from ((one.kind, phase, ranks) for phase in (one.phase, None) for ranks in (one.ranks, ()))


def _counted(
    one: Sent, payload_bytes: float, expected: Expected, single: Counter[tuple[str, str | None, Ranks, float]]
) -> bool:
    """Count ``one`` in ``single`` if it is expected once more."""
    keys = ((*key, payload_bytes) for key in _keys(one))
    key = next((key for key in keys if single[key] < expected.single[key]), None)
    if key is not None:
        single[key] += 1
    return key is not None


def _unequal(expected: Mapping[Any, int], got: Mapping[Any, int], unit: str) -> Iterator[str]:
    for key in dict.fromkeys((*expected, *got)):
        if expected.get(key, 0) != got.get(key, 0):
            what = " ".join(str(part) for part in key if part is not None)
            yield f"{what}: recorded {expected.get(key, 0)} {unit}, issued {got.get(key, 0)}"


def unrecorded(trace: RankTrace, placed: PlacedModel, records: Iterable[Record]) -> list[str]:
    """In words where a traced step of one rank differs from ``records``. Fake tensors dispatch no tokens."""
    sent = []
    for one in trace.communications:
        if one.kind != "recv" and (one.kind == "send" or len(one.ranks) > 1):
            gathered = len(one.ranks) if one.kind == "all_gather" else 1
            payload, narrow = (
                float(one.numel * width * gathered)
                for width in (one.dtype.itemsize, itemsize_of(one.dtype, placed.plan.precision))
            )
            sent.append(Sent(one.kind, None, one.ranks, payload, narrow if narrow != payload else None))
    records = [record for record in records if not record.dispatch]
    return differences(expected_of(placed, records, trace.rank, phases=False), sent)[0]
