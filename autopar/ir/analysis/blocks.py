"""Block repetition: a model as a row of blocks, and which of them are the same program.

    prelude | embed | layer | layer | layer | head       kinds: embed x 1, layer x 3, head x 1

Repeats are found by structure (``tandem_repeats``), never by module names; what does not repeat is divided at
narrow points (``pipeline_cuts``). Everything downstream works on one instance of each kind, so its cost grows with
the number of distinct blocks and not with the depth of the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import fx

from autopar.ir.analysis.cut_costs import Liveness, liveness
from autopar.ir.analysis.op_keys import instance_name, kind_name, op_keys, shared_modules, starred_paths
from autopar.ir.analysis.op_stream import Stream, build_stream
from autopar.ir.analysis.pipeline_cuts import divide
from autopar.ir.analysis.tandem_repeats import Repeat, Wiring, find_repeats
from autopar.ir.graph import CapturedModel

# Number in place of a block's: of step inputs, and of what depends on no parameter and runs ahead of all blocks.
PRELUDE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One block instance. ``kind`` is a position in ``BlockRepetition.kinds``; ``nodes`` are in execution order."""

    index: int
    kind: int
    name: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """A distinct block. Its ``repeats`` instances are consecutive; ``keys`` name their ops, node by node."""

    name: str
    repeats: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRepetition:
    """The blocks of a captured model, in an order in which they can run.

    prelude: ops that depend on no parameter, recomputed on every stage that needs them.
    representative: every call node, parameter and buffer -> its counterpart in the first instance of its
        kind; prelude ops, and parameters shared between blocks, stand for themselves.
    key: every call node of a block -> its key, unique within its kind.
    block_of: every call node of a block -> index of the block. Prelude ops are not in it.
    crossings: per index what ``crossing`` returns, from 0 to the number of blocks.
    """

    prelude: tuple[fx.Node, ...]
    blocks: tuple[Block, ...]
    kinds: tuple[BlockKind, ...]
    representative: dict[fx.Node, fx.Node]
    key: dict[fx.Node, str]
    block_of: dict[fx.Node, int]
    crossings: tuple[tuple[fx.Node, ...], ...]

    def crossing(self, index: int) -> tuple[fx.Node, ...]:
        """Values made before block ``index`` and read by it or later blocks, in execution order.

        Prelude values, parameters and step inputs are not among them: every stage has its own.
        """
        return self.crossings[index]


def find_repetition(captured: CapturedModel) -> BlockRepetition:
    """Partition the call nodes of ``captured`` into prelude and blocks, and find the blocks that are equal.

    Deterministic; O(n^2) vectorised comparisons for n call nodes (n = 5,000 takes well under a second).
    """
    stream = build_stream(captured)
    live = liveness(captured, stream)
    repeats = _repeats(stream, live)
    bounds, run_of = _bounds(stream, live, repeats)
    contents = _contents(stream, bounds, run_of)
    if run_of and run_of[0] != -1 and len(contents) > len(run_of):
        run_of = [-1, *run_of]
    groups = _groups(captured, stream, contents, run_of)
    return _assemble(captured, stream, contents, groups)


def _repeats(stream: Stream, live: Liveness) -> list[Repeat]:
    profiles: dict[int, list[tuple[int, int]]] = {}

    def cut_cost(cut: int, period: int) -> tuple[float, ...] | None:
        if period not in profiles:
            profiles[period] = live.profile(longest=2 * period)
        count, size = profiles[period][cut]
        return (size + 1e15 * (count // 1_000_000), live.depths[cut])

    wiring = Wiring(
        tokens=stream.tokens, reads=stream.reads, position=stream.position, heavy=stream.heavy, cut_cost=cut_cost
    )
    return find_repeats(wiring, end=min(live.last_cut, live.length))


def _bounds(stream: Stream, live: Liveness, repeats: list[Repeat]) -> tuple[list[int], list[int]]:
    """First positions of all blocks and the end, and per block the number of its repeat (-1: none)."""
    starts: list[int] = []
    run_of: list[int] = []
    at = 0
    end = len(stream.nodes)
    for number, repeat in enumerate([*repeats, None]):
        stop = repeat.start if repeat else end
        if at < stop:
            cuts = [at, *divide(live, stream.heavy, at, stop)]
            starts.extend(cuts)
            run_of.extend([-1] * len(cuts))
        if repeat:
            starts.extend(range(repeat.start, repeat.end, repeat.period))
            run_of.extend([number] * repeat.count)
            at = repeat.end
    return [*starts, end], run_of


def _contents(stream: Stream, bounds: list[int], run_of: list[int]) -> list[list[fx.Node]]:
    """Nodes of every block: its stretch of the stream, and each source in front of its first reader.

    A source that several instances of a repeat read is made in the last block before that repeat, so that
    the first instance is like the others; if there is none, in a block of its own at the front.
    """
    block_at: list[int] = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        block_at.extend([index] * (end - start))
    owner: dict[fx.Node, int] = {node: block_at[at] for at, node in enumerate(stream.nodes)}
    for at, extra in stream.attached.items():
        owner.update((node, block_at[at]) for node in extra)
    sources = set(stream.sources)
    for node in reversed(stream.sources):
        readers = sorted({owner[user] for user in node.users if user in owner})
        if not readers:
            continue
        first = readers[0]
        in_runs = Counter(run_of[index] for index in readers if index >= 0 and run_of[index] >= 0)
        if in_runs and max(in_runs.values()) > 1:
            shared = min(index for index in readers if index < 0 or in_runs[run_of[index]] > 1)
            first = min(first, shared)
            while first >= 0 and run_of[first] >= 0:
                first -= 1
        owner[node] = first

    contents: list[list[fx.Node]] = [[] for _ in run_of]
    front: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node, index: int) -> None:
        if node in placed:
            return
        placed.add(node)
        for operand in stream.operands[node]:
            if operand in sources and owner[operand] == index:
                place(operand, index)
        (front if index < 0 else contents[index]).append(node)

    for index, (start, end) in enumerate(pairwise(bounds)):
        for at in range(start, end):
            for extra_node in stream.attached.get(at, ()):
                place(extra_node, index)
            place(stream.nodes[at], index)
    for node in stream.sources:
        place(node, owner[node])
    return [front, *contents] if front else contents


def _groups(
    captured: CapturedModel, stream: Stream, contents: list[list[fx.Node]], run_of: list[int]
) -> list[list[int]]:
    """Consecutive blocks of one repeat with exactly the same structure, as lists of block indices."""
    signatures = [
        (run, _structure(captured, stream, nodes) if run >= 0 else index)
        for index, (run, nodes) in enumerate(zip(run_of, contents, strict=True))
    ]
    return [[index for index, _ in group] for _, group in groupby(enumerate(signatures), key=lambda item: item[1])]


def _structure(captured: CapturedModel, stream: Stream, nodes: list[fx.Node]) -> tuple[object, ...]:
    """What two instances must agree in: ops, and which operands are the same values."""
    local: dict[fx.Node, int] = {}
    given: dict[fx.Node, int] = {}
    described: list[object] = []
    for node in nodes:
        operands: list[object] = []
        for operand in stream.operands[node]:
            if operand in local:
                operands.append(local[operand])
            elif operand.name in captured.parameters or operand.name in captured.buffers:
                operands.append(("own", given.setdefault(operand, len(given))))
            else:
                # Carried and shared values were compared when the repeat was found.
                operands.append("outer")
        local[node] = len(local)
        described.append((stream.signature[node], tuple(operands)))
    return tuple(described)


def _assemble(
    captured: CapturedModel, stream: Stream, contents: list[list[fx.Node]], groups: list[list[int]]
) -> BlockRepetition:
    blocks: list[Block] = []
    kinds: list[BlockKind] = []
    representative: dict[fx.Node, fx.Node] = {node: node for node in stream.prelude}
    key: dict[fx.Node, str] = {}
    block_of: dict[fx.Node, int] = {}
    taken: Counter[str] = Counter()
    named: set[str] = set()
    shared = shared_modules(contents)
    for number, group in enumerate(groups):
        instances = [contents[index] for index in group]
        first = instances[0]
        paths = starred_paths(instances)
        sizes = [_largest_parameter(captured, node) for node in first]
        path = kind_name(paths, first, sizes.index(max(sizes)), shared)
        name = ".".join(path)
        taken[name] += 1
        suffix = f"#{taken[name]}" if taken[name] > 1 else ""
        keys = op_keys(path, paths, first)
        kinds.append(BlockKind(name=name + suffix, repeats=len(group), keys=tuple(keys)))
        for index, nodes in zip(group, instances, strict=True):
            instance = instance_name(path, nodes, index) + suffix
            if instance in named:  # a module that is called again, as a cell in a loop
                instance += f"[{index}]"
            named.add(instance)
            blocks.append(Block(index=index, kind=number, name=instance, nodes=tuple(nodes)))
            key.update(zip(nodes, keys, strict=True))
            block_of.update((node, index) for node in nodes)
            representative.update(zip(nodes, first, strict=True))
    _represent_placeholders(captured, stream, blocks, representative)
    return BlockRepetition(
        prelude=stream.prelude,
        blocks=tuple(blocks),
        kinds=tuple(kinds),
        representative=representative,
        key=key,
        block_of=block_of,
        crossings=_crossings(blocks, block_of),
    )


def _largest_parameter(captured: CapturedModel, node: fx.Node) -> int:
    return max(
        (captured.parameters[o.name].numel for o in node.all_input_nodes if o.name in captured.parameters), default=0
    )


def _represent_placeholders(
    captured: CapturedModel, stream: Stream, blocks: list[Block], representative: dict[fx.Node, fx.Node]
) -> None:
    """Map the parameters and buffers that one block alone uses to those of the first instance."""
    users: dict[fx.Node, set[int]] = {}
    for block in blocks:
        for node in block.nodes:
            for operand in node.all_input_nodes:
                if operand.name in captured.parameters or operand.name in captured.buffers:
                    users.setdefault(operand, set()).add(block.index)
    for block in blocks:
        for node in block.nodes:
            for own, first in zip(stream.operands[node], stream.operands[representative[node]], strict=True):
                if own in users:
                    alone = len(users[own]) == 1 and len(users[first]) == 1
                    representative.setdefault(own, first if alone else own)
    for placeholder in captured.graph.nodes:
        if placeholder.name in captured.parameters or placeholder.name in captured.buffers:
            representative.setdefault(placeholder, placeholder)


def _crossings(blocks: list[Block], block_of: dict[fx.Node, int]) -> tuple[tuple[fx.Node, ...], ...]:
    crossing: list[list[fx.Node]] = [[] for _ in range(len(blocks) + 1)]
    for block in blocks:
        for node in block.nodes:
            last = max((block_of[user] for user in node.users if user in block_of), default=block.index)
            for cut in range(block.index + 1, last + 1):
                crossing[cut].append(node)
    return tuple(tuple(nodes) for nodes in crossing)
