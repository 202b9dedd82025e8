"""The critical path of a step that was run, from a torch.profiler trace of every rank.

    rank 0   forward ───── waiting ──────────── backward         read backwards from the last rank to end: where a rank
                    ╲                          ╱                 waits, the path is the communication from the moment
             send    activations    gradients ╱                  at which the last rank that has a part in it began it,
                              ╲              ╱                   and goes on there
    rank 1     waiting         forward backward

Clocks are those of one machine. What a rank computes while a communication is under way is not on the path.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.checking.matching import Places
from autopar.checking.recorder import Communication
from autopar.ir.plan import Plan
from autopar.ir.primitives.collective_counter import kind_of_collective

# Names of annotations: a step, and whatever blocks a rank until a communication is done.
STEP, WAIT = "step", "waiting"
_WAITS = {WAIT, "_c10d_functional::wait_tensor"}
# Microseconds. A call that takes less did not wait: ranks take turns of a third of it on a core. What ends so long
# after a communication was waiting for it.
_LEAST_US, _LATE_US = 1000.0, 1000.0


class Key(NamedTuple):
    """One communication of a step, alike on all ranks that have a part in it. ranks: sender and receiver of a send.

    number: how many such came before it in the step.
    """

    kind: str
    ranks: tuple[int, ...]
    number: int


class Part(NamedTuple):
    """What one rank did of a communication: when it began it, and when it had ended; microseconds."""

    key: Key
    begun: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank. waits: of its own thread, when and until when it stood still."""

    start: float
    end: float
    waits: tuple[tuple[float, float], ...]
    parts: tuple[Part, ...]


class Segment(NamedTuple):
    """A part of the path. key: of the communication that is under way, None where ``rank`` computes."""

    rank: int
    start: float
    end: float
    key: Key | None


def read_steps(trace: Path, rank: int, known: Sequence[Communication]) -> list[RankStep]:
    """The steps of a trace. known: the communications of each step, in the order in which the rank begins them.

    Raises AssertionError where the trace has others.
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    steps = [event for event in events if event["name"] == STEP and event["cat"] == "user_annotation"]
    return [_rank_step(step, [e for e in events if _contains(step, e)], rank, known) for step in steps]


def _rank_step(
    step: Mapping[str, Any], events: list[dict[str, Any]], rank: int, known: Sequence[Communication]
) -> RankStep:
    own = [event for event in events if event["tid"] == step["tid"]]
    begun = list(_outermost(event for event in own if _kind(event["name"]) not in (None, "barrier")))
    kinds = [_kind(event["name"]) for event in begun]
    assert kinds == [one.kind for one in known], f"rank {rank}: the trace has {kinds}, the program {known}"
    work: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
    for event in events:
        if event["name"].startswith("gloo:") and event["name"] != "gloo:barrier":
            work[_way(event["name"].removeprefix("gloo:"))].append(event)
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    parts = []
    for event, one in zip(begun, known, strict=True):
        ranks = {"send": (rank, *one.ranks), "recv": (*one.ranks, rank)}.get(one.kind, one.ranks)
        kind = "send" if one.is_point_to_point else one.kind
        done = work[_way(one.kind)].popleft()
        parts.append(Part(Key(kind, ranks, counts[kind, ranks]), event["ts"], done["ts"] + done["dur"]))
        counts[kind, ranks] += 1
    waits = tuple((e["ts"], e["ts"] + e["dur"]) for e in _outermost(e for e in own if e["name"] in _WAITS))
    return RankStep(start=step["ts"], end=step["ts"] + step["dur"], waits=waits, parts=tuple(parts))


def waited(step: RankStep) -> Iterator[tuple[float, float, Part]]:
    """The waits of a rank with what each was for: of the communications that ended in it, the last."""
    for start, end in step.waits:
        ended = [part for part in step.parts if part.begun < end and start < part.ended <= end + _LATE_US]
        if end - start >= _LEAST_US and ended:
            yield start, end, max(ended, key=lambda part: part.ended)


def critical_path(ranks: Sequence[RankStep]) -> list[Segment]:
    """The path of a step, from its beginning to its end without a gap."""
    begun: dict[Key, list[tuple[float, int]]] = {}
    for rank, step in enumerate(ranks):
        for part in step.parts:
            begun.setdefault(part.key, []).append((part.begun, rank))
    waits = [list(waited(step)) for step in ranks]
    time, rank = max((step.end, number) for number, step in enumerate(ranks))
    first = min(step.start for step in ranks)
    path: list[Segment] = []
    while time > first:
        before = [one for one in waits[rank] if one[1] <= time]
        if not before:
            path.append(Segment(rank, first, time, None))
            break
        start, end, part = max(before, key=lambda one: one[1])
        path.append(Segment(rank, end, time, None))
        last, by = max(begun[part.key])
        # Clocks of cores differ a little: what cannot be is taken to be as long as the rank waited.
        time, rank = (last, by) if last < end else (start, rank)
        path.append(Segment(rank, time, end, part.key))
    return path[::-1]


def label(key: Key | None, plan: Plan) -> str:
    """What a communication is and the axes it is over; ``compute`` if there is none.

    What a send holds is left open: under a V-shaped schedule neighbours send activations and gradients both ways.
    """
    if key is None:
        return "compute"
    axes, _ = Places.of(plan).joined(tuple(sorted(key.ranks)))
    return f"{key.kind}, {' '.join(('pp', *plan.stage_mesh.names)[axis] for axis in axes)}"


def _kind(name: str) -> str | None:
    """Of the collective that an op of a trace is, if it is one."""
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None) if op else None
    return None if packet is None else kind_of_collective(getattr(packet, packet.overloads()[0]))


def _way(kind: str) -> str:
    """What gloo's work is told apart by: it runs some collectives as others, in the order in which they are begun."""
    return kind if kind in ("send", "recv") else "collective"


def _outermost(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events, in order of time, that are not inside another of them."""
    end = float("-inf")
    for event in events:
        if event["ts"] >= end:
            end = event["ts"] + event["dur"]
            yield event


def _contains(step: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    return bool(step["ts"] <= event["ts"] < step["ts"] + step["dur"])
