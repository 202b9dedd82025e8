"""What is where: the part of the sequence that each rank holds, and the tensors that fill its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from autopar.ir.lowered.attention import QUERIES, is_attention
from autopar.ir.plan import Plan
from autopar.ir.rule import Assignment, factors_of_choice
from autopar.ir.sequence import Span, spans
from autopar.search.pricing.block_moves import layouts_of
from autopar.search.pricing.block_prices import evaluate
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.constraints import role_of_axis
from autopar.search.problem.kept_sets import level_names
from autopar.units import gib, plural

# Nodes whose ranks are drawn.
_MAX_NODES = 16

_ATTENTIONS = ("attention", "scaled_dot_product_attention")
_HOW = {
    "ring": "keys and values go round a ring over {axes}",
    "gathered": "keys and values are gathered over {axes}",
    "heads": "over {axes} the sequence is exchanged for heads around each attention",
}


class ContextAxis(NamedTuple):
    """A mesh axis that divides the sequence. attention: how it divides attention, a key of ``_HOW``; "" without one."""

    name: str
    size: int
    attention: str


def context_axes(plan: Plan) -> tuple[ContextAxis, ...]:
    """Axes of more than one rank that attention has queries on, or that are for context, outermost first."""
    found = []
    for name, size in plan.mesh.items():
        choices = Counter[str]()
        for block in plan.blocks:
            for key, axes in block.ops.items():
                if name in axes and key.rpartition("/")[2].partition(":")[0] in _ATTENTIONS:
                    choices[axes[name]] += block.repeats
        factors = factors_of_choice(choices.most_common(1)[0][0]) if choices else ()
        how = ("ring" if "t" in factors else "gathered") if QUERIES in factors else "heads" if factors else ""
        if size > 1 and (QUERIES in factors or role_of_axis(name) == "cp"):
            found.append(ContextAxis(name, size, how))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlaces:
    """Where a sequence of ``length`` lies: on ``num_places`` places along ``axes``, outermost first.

    zigzag_ranks: that share it in zigzag layout, 1 in natural order.
    """

    plan: Plan
    length: int
    axes: tuple[ContextAxis, ...]
    zigzag_ranks: int

    @classmethod
    def of(cls, plan: Plan) -> SequencePlaces | None:
        """None of a plan that leaves the sequence whole."""
        axes = context_axes(plan)
        if plan.model.seq is None or not axes:
            return None
        sharing = prod(axis.size for axis in axes if axis.attention != "heads")
        zigzag = sharing if plan.sequence_layout == "zigzag" else 1
        return cls(plan=plan, length=plan.model.seq, axes=axes, zigzag_ranks=zigzag)

    @property
    def num_places(self) -> int:
        """Into how many pieces the sequence is cut."""
        return prod(axis.size for axis in self.axes)

    def place_of(self, rank: int) -> int:
        """Which of the pieces a rank has."""
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.plan.mesh.items()):
            rank, coordinates[name] = divmod(rank, size)
        place = 0
        for axis in self.axes:
            place = place * axis.size + coordinates[axis.name]
        return place

    def held(self, rank: int) -> tuple[Span, ...]:
        """The positions that a rank holds."""
        return spans(self.length, self.zigzag_ranks, self.place_of(rank), self.num_places)

    @property
    def words(self) -> str:
        """How it is cut, and what attention does about it."""
        tokens = sum(map(len, self.held(0)))
        pieces = len(self.held(0))
        how = []
        for kind, text in _HOW.items():
            names = [f"{axis.name} {axis.size}" for axis in self.axes if axis.attention == kind]
            how += [text.format(axes=" × ".join(names))] if names else []
        cut = " × ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        return (
            f"{self.length:,} tokens over {cut}: {tokens:,} a rank"
            + (f", in {plural(pieces, 'part')} (zigzag, so that all have equal work)" if pieces > 1 else "")
            + "".join(f"; {one}" for one in how)
        )


def sequence_data(plan: Plan) -> dict[str, Any] | None:
    """``words``, ``length``, and of the ranks of the first nodes ``[start, stop]`` of what they hold.

    None of a plan that leaves the sequence whole.
    """
    places = SequencePlaces.of(plan)
    if places is None:
        return None
    per_node = min(plan.cluster.gpus_per_node, plan.num_ranks)
    num_nodes = -(-plan.num_ranks // per_node)
    firsts = range(0, min(num_nodes, _MAX_NODES) * per_node, per_node)
    return {
        "words": places.words,
        "length": places.length,
        "num_nodes": num_nodes,
        "nodes": [
            [{"rank": rank, "spans": [list(span) for span in places.held(rank)]} for rank in ranks]
            for ranks in (range(first, min(first + per_node, plan.num_ranks)) for first in firsts)
        ],
    }


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one kind of tensors on the fullest rank. part: of ``MemoryParts``. inside: counted in the row above."""

    part: str
    what: str
    num_bytes: float
    inside: bool = False


def held_at_peak(plan: Plan, pricing: Pricing, assignment: tuple[Assignment, ...]) -> list[Held]:
    """The memory of the fullest rank of the pipeline at its peak, by part, with what the parts are made of; nothing
    without a prediction.

    Rows inside activations are of one microbatch, all blocks of the rank together. Those inside what a block needs
    itself are the largest tensors of its ops, of which a backward has several at once.
    """
    memory = [] if plan.prediction is None else plan.prediction.memory_parts_bytes
    if not memory:
        return []
    place = max(range(len(memory)), key=lambda number: sum(memory[number].values()))
    parts = memory[place]
    found = [Held(name, name, parts[name]) for name in ("parameters", "gradients", "optimizer")]
    found.append(Held("activations", "activations kept for backward", parts["activations"]))
    found += _kept(plan, pricing, assignment, place)
    found.append(Held("transient", "what the block needs itself that runs backward", parts["transient"]))
    found += _inside(pricing, assignment)
    found.append(Held("workspace", "lost to the allocator", parts["workspace"]))
    return [one for one in found if one.num_bytes]


def _kept(plan: Plan, pricing: Pricing, assignment: tuple[Assignment, ...], place: int) -> Iterator[Held]:
    blocks = evaluate(pricing, assignment, shared_once=plan.num_stages == 1).blocks
    kinds = pricing.workload.repetition
    sizes: dict[tuple[str, str], list[float]] = {}
    on_host: dict[tuple[str, str], float] = {}
    levels = level_names(pricing.kept)
    for number, block in enumerate(blocks):
        if plan.pipelining.rank_of(plan.stage_of(number)) == place:
            level = plan.remat_of(number)
            name = kinds.kinds[kinds.blocks[number].kind].name
            sizes.setdefault((name, level), []).append(block.saved_bytes[levels.index(level)])
            on_host[name, level] = block.host[levels.index(level)].num_bytes
    for (name, remat), own in sizes.items():
        several = f"{len(own)} of {name}, {gib(own[0])} each" if len(own) > 1 else name
        host = on_host[name, remat]
        beside = f"; {gib(host)} of each in host memory" if host else ""
        yield Held("activations", f"{several}, remat {remat}{beside}", sum(own), inside=True)


def _inside(pricing: Pricing, assignment: tuple[Assignment, ...]) -> Iterator[Held]:
    """Tensors of one attention, the largest one of another op, and logits, of the kinds of blocks that have most."""
    workload = pricing.workload
    assignments = layouts_of(workload, assignment).assignments
    sizes = pricing.mesh, pricing.num_microbatches
    most: dict[str, Held] = {}

    def note(kind: str, what: str, num_bytes: float) -> None:
        if kind not in most or most[kind].num_bytes < num_bytes:
            most[kind] = Held("transient", what, num_bytes, inside=True)

    for activations in workload.kept(pricing.memory).blocks:
        saved = dict.fromkeys((*activations.saved, *activations.kept))
        attended, chunks = 0.0, activations.chunks(assignments, *sizes)
        losses = {node for pair in chunks for node in pair}
        for tensor in saved:
            size = tensor.local_bytes(assignments[tensor.node], *sizes)
            if is_attention(tensor.node):
                attended += size
            elif tensor.node not in losses:
                note("op", f"the largest tensor of an op: {workload.repetition.key[tensor.node]}", size)
        note("attention", "one attention on a rank: queries, keys, values, result", attended)
        for loss in activations.losses:
            if (chunked := chunks.get(loss.pair)) is not None:
                whole = loss.logits.local_bytes(assignments[loss.pair.linear], *sizes)
                note("loss", f"logits of a chunk of tokens; of all of a rank's {gib(whole)}", chunked.working_bytes)
    yield from most.values()
