"""Whether the communications of all ranks fit together.

Ranks at one place of the pipeline run one program, so what one of them does stands for all that were not run. A step is
replayed on the ranks that were: a collective ends when all of them that have a part in it have come to it, a receive
when what it takes has been sent, a send at once. Where nothing moves any more, somebody waits for what never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.checking.ranks import RankTrace
from autopar.checking.recorder import Communication
from autopar.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks are: (rank of the pipeline, coordinates in the stage mesh). The pipeline is the outermost."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Places:
        """The places of the ranks of a plan."""
        return cls((plan.num_pipeline_ranks, *plan.stage_mesh.sizes))

    def __call__(self, rank: int) -> tuple[int, ...]:
        found = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))

    def joined(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes along which ``ranks`` differ, 0 the pipeline; and their ranks of the pipeline."""
        places = [self(rank) for rank in ranks]
        axes = tuple(axis for axis in range(len(self.sizes)) if len({place[axis] for place in places}) > 1)
        return axes, tuple(sorted({place[0] for place in places}))


@dataclass(slots=True)
class _Node:
    """A rank that was run, in the replay. position: of the communication that it is at."""

    trace: RankTrace
    place: tuple[int, ...]
    position: int = 0
    sent: dict[int, list[Communication]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)

    @property
    def at(self) -> Communication | None:
        every = self.trace.communications
        return every[self.position] if self.position < len(every) else None


def mismatch(traces: Sequence[RankTrace], plan: Plan) -> str | None:
    """The communications that do not match, and where every rank stands; None if all match."""
    places = Places.of(plan)
    nodes = [_Node(trace, places(trace.rank)) for trace in traces]
    wrong: str | None = None
    moved = True
    while moved and wrong is None:
        moved = False
        for node in nodes:
            while node.at is not None and wrong is None:
                done, wrong = _pass(node, nodes, places)
                if not done:
                    break
                moved = True
    if wrong is None and all(node.at is None for node in nodes):
        return None
    head = wrong or "ranks wait for each other"
    return head + "\n" + "\n".join(_standing(node) for node in nodes)


def _pass(node: _Node, nodes: Sequence[_Node], places: Places) -> tuple[bool, str | None]:
    """Let ``node`` go past what it is at, with all that do it together; whether it could, and what is wrong."""
    own = node.at
    assert own is not None
    if own.is_point_to_point:
        return _point_to_point(node, nodes, places)
    group = _group(own, places)
    others = [other for other in nodes if other.place[0] in group[1]]
    for other in others:
        theirs = other.at
        if theirs is None:
            return False, f"rank {other.trace.rank} has ended; rank {node.trace.rank} is in {own}"
        if theirs.is_point_to_point or _group(theirs, places) != group:
            return False, None
    for other in others:
        theirs = other.at
        assert theirs is not None
        if (theirs.kind, theirs.numel, theirs.dtype, theirs.reduction) != (
            own.kind, own.numel, own.dtype, own.reduction,
        ):  # fmt: skip
            return False, f"rank {node.trace.rank} is in {own}; rank {other.trace.rank} in {theirs}"
    for other in others:
        other.position += 1
    return True, None


def _group(communication: Communication, places: Places) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return places.joined(communication.ranks)


def _point_to_point(node: _Node, nodes: Sequence[_Node], places: Places) -> tuple[bool, str | None]:
    own = node.at
    assert own is not None
    there = places(own.ranks[0])
    if there[1:] != node.place[1:]:
        return False, f"rank {node.trace.rank}: {own}, which is at another place of its stage"
    if own.kind == "send":
        node.sent.setdefault(there[0], []).append(own)
        node.position += 1
        return True, None
    # The rank itself if it was run, else the one that stands for it.
    peers = sorted((other for other in nodes if other.place[0] == there[0]), key=lambda other: other.place != there)
    if not peers:
        return False, f"rank {node.trace.rank}: {own}, and no rank of that stage was run"
    arrived = peers[0].sent.get(node.place[0], [])
    number = node.taken.get(there[0], 0)
    if number >= len(arrived):
        return False, None
    if (arrived[number].numel, arrived[number].dtype) != (own.numel, own.dtype):
        return False, f"rank {node.trace.rank}: {own}; rank {peers[0].trace.rank}: {arrived[number]}"
    node.taken[there[0]] = number + 1
    node.position += 1
    return True, None


def _standing(node: _Node) -> str:
    every = node.trace.communications
    at = f"{node.position + 1} of {len(every)}, {node.at}" if node.at is not None else f"all {len(every)} done"
    return f"  rank {node.trace.rank}: {at}"
