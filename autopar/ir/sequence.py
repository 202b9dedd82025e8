"""A sequence in pieces: which positions a rank holds, what they see of each other, how pieces go round a ring.

A sequence of n ranks is stored in natural order (``zigzag_ranks`` is 1) or in zigzag layout (``zigzag_ranks`` is n):
cut into 2 n chunks, the first next to the last, the second next to the last but one, and so on.

    zigzag_ranks 1     0 1 | 2 3 | 4 5 | 6 7
    zigzag_ranks 4     0 7 | 1 6 | 2 5 | 3 4

Under a causal mask rank r of a natural sequence sees r + 1/2 pieces; in zigzag layout all ranks see equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise, product, starmap
from math import prod
from typing import Literal, NamedTuple

from autopar.ir.ops.composite import AttentionKind

SequenceLayout = Literal["contiguous", "zigzag"]

# Of a ring, besides the first, that are looked at to know how many blocks it has.
_STEPS = 8


class Span(NamedTuple):
    """Positions ``start`` to ``stop``, exclusive."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def stored(length: int, index: int, count: int) -> Span:
    """Where piece ``index`` of ``count`` lies in storage.

    Pieces are equal where ``count`` divides; otherwise the first ones have one more, as ``Tensor.tensor_split`` cuts.
    """
    small, longer = divmod(length, count)
    first = index * small + min(index, longer)
    return Span(first, first + small + (index < longer))


@lru_cache(maxsize=4096)
def spans(length: int, zigzag_ranks: int, index: int = 0, count: int = 1) -> tuple[Span, ...]:
    """Positions that piece ``index`` of ``count`` holds of a sequence of ``length``, in the order it holds them."""
    first, last = stored(length, index, count)
    found: list[Span] = []
    pairs, passed = range(zigzag_ranks), 0
    if length and length % (2 * zigzag_ranks) == 0:
        # Chunks are equal: those before and after the piece can be left out.
        pair_length = length // zigzag_ranks
        pairs = range(first // pair_length, -(-last // pair_length))
        passed = pairs.start * pair_length
    for order in (order for pair in pairs for order in (pair, 2 * zigzag_ranks - 1 - pair)):
        chunk = Span(length * order // (2 * zigzag_ranks), length * (order + 1) // (2 * zigzag_ranks))
        low, high = max(first - passed, 0), min(last - passed, len(chunk))
        passed += len(chunk)
        if low >= high:
            continue
        span = Span(chunk.start + low, chunk.start + high)
        if found and found[-1].stop == span.start:
            span = Span(found.pop().start, span.stop)
        found.append(span)
    return tuple(found)


@lru_cache(maxsize=1024)
def natural_order(positions: tuple[Span, ...]) -> tuple[Span, ...]:
    """Places of a piece that holds ``positions``, in the order of these."""
    return tuple(own.places for own in sorted(held(positions)))


@lru_cache(maxsize=1024)
def joined(positions: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans in order, those that touch as one."""
    found: list[Span] = []
    for span in sorted(positions):
        found.append(Span(found.pop().start, span.stop) if found and found[-1].stop == span.start else span)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Sight:
    """The keys that a query sees, by position: kind and window as in ``composite.attention``, its mask operand
    apart."""

    kind: AttentionKind
    window: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.kind in ("causal", "sliding")

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Key t is seen by query s if ``s - window < t <= s``: (window, 0); None where there is no bound."""
        return (self.window if self.kind == "sliding" else None, 0 if self.is_causal else None)

    def sees_all(self, queries: Span, keys: Span) -> bool:
        """Whether every query of a span sees every key of a span."""
        window, ahead = self.reach
        return (ahead is None or keys.stop - 1 <= queries.start) and (
            window is None or keys.start > queries.stop - 1 - window
        )

    def sees_none(self, queries: Span, keys: Span) -> bool:
        """Whether no query of a span sees any key of a span."""
        window, ahead = self.reach
        return not (len(queries) and len(keys)) or (
            (ahead is not None and keys.start > queries.stop - 1)
            or (window is not None and keys.stop - 1 <= queries.start - window)
        )

    def parts(self, queries: Span, keys: Span) -> Iterator[Span]:
        """``keys``, cut where what all, some and none of the queries see of them begins."""
        window, ahead = self.reach
        places = [] if ahead is None else [queries.start, queries.stop]
        if window is not None:
            places += [queries.start - window + 1, min(queries.stop - window, queries.start)]
        inside = sorted({place for place in places if keys.start < place < keys.stop})
        return starmap(Span, pairwise([keys.start, *inside, keys.stop]))

    def num_pairs(self, queries: Span, keys: Span) -> int:
        """Number of (query, key) that see each other."""
        window, ahead = self.reach
        if ahead is None:
            return len(queries) * len(keys)
        pairs = _pairs(queries, keys, 0)
        return pairs if window is None else pairs - _pairs(queries, keys, window)


def _pairs(queries: Span, keys: Span, behind: int) -> int:
    """Number of (s, t) with t <= s - behind."""

    def below(x: int) -> int:
        """Sum of min(y, number of keys) over y = 1 .. x."""
        x, most = max(x, 0), len(keys)
        return x * (x + 1) // 2 if x <= most else most * (most + 1) // 2 + (x - most) * most

    first = queries.start - behind + 1 - keys.start
    return below(first + len(queries) - 1) - below(first - 1)


@dataclass(frozen=True, slots=True)
class Block:
    """Local queries ``rows`` against keys ``columns`` of a piece; their positions are ``queries`` and ``keys``.

    whole: every query sees every key (``keys`` is then of no use). Otherwise the sight decides for each pair.
    """

    rows: Span
    columns: Span
    queries: Span
    keys: Span
    whole: bool


class Held(NamedTuple):
    """``positions`` that a piece holds at ``places``, counted from its start."""

    positions: Span
    places: Span


def held(positions: Sequence[Span]) -> tuple[Held, ...]:
    """Spans that a piece holds one after the other, with their places in it."""
    starts = accumulate(map(len, positions), initial=0)
    return tuple(Held(own, Span(at, at + len(own))) for own, at in zip(positions, starts, strict=False))


@lru_cache(maxsize=4096)
def blocks(sight: Sight, queries: tuple[Span, ...], keys: tuple[Span, ...]) -> tuple[Block, ...]:
    """The blocks of scores that are not hidden: few, and those whole or square that can be."""
    return tuple(blocks_between(sight, held(queries), held(keys)))


def blocks_between(sight: Sight, queries: Sequence[Held], keys: Sequence[Held]) -> Iterator[Block]:
    """``blocks`` of some of the queries and some of the keys of two pieces."""
    for query, rows in queries:
        pending: Block | None = None
        for key, columns in ((part, columns) for own in keys for part, columns in _parts(sight, query, own)):
            whole = sight.sees_all(query, key)
            if pending is not None and whole and pending.columns.stop == columns.start:
                pending = Block(rows, Span(pending.columns.start, columns.stop), query, key, True)
                continue
            if pending is not None:
                yield pending
            pending = Block(rows, columns, query, key, True) if whole else None
            if not whole and not sight.sees_none(query, key):
                yield Block(rows, columns, query, key, False)
        if pending is not None:
            yield pending


def _parts(sight: Sight, queries: Span, keys: Held) -> Iterator[Held]:
    offset = keys.places.start - keys.positions.start
    for part in sight.parts(queries, keys.positions):
        yield Held(part, Span(part.start + offset, part.stop + offset))


@lru_cache(maxsize=1024)
def hops(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The group that each hop goes along so that every rank holds every piece once; the last group is innermost.

    Along several groups the inner ring goes round once for each hop of the outer one.
    """
    found = []
    for number in range(1, prod(sizes)):
        stride = 1
        for group in reversed(range(len(sizes))):
            stride *= sizes[group]
            if number % stride:
                found.append(group)
                break
    return tuple(found)


def owner(place: tuple[int, ...], sizes: tuple[int, ...], taken: Sequence[int]) -> tuple[int, ...]:
    """The owner of the piece that the rank at ``place`` holds after the hops ``taken``."""
    return _turned(place, sizes, [taken.count(group) for group in range(len(sizes))])


def _turned(place: tuple[int, ...], sizes: tuple[int, ...], hops_along: Sequence[int]) -> tuple[int, ...]:
    return tuple((own - hops) % size for own, size, hops in zip(place, sizes, hops_along, strict=True))


def number_of(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of the piece of the rank at ``place``; the first group is the major one."""
    index = 0
    for own, size in zip(place, sizes, strict=True):
        index = index * size + own
    return index


@dataclass(frozen=True, slots=True)
class RingShape:
    """A ring attention: what is seen, and how queries and keys are cut.

    lengths: of queries and keys, all pieces together. sizes: of the groups that cut the queries, major first.
    ring: for each of them whether it cuts the keys too, and so is gone round. by_documents: the order for as many
    ``zigzag_ranks`` is one of documents that are known when it runs (``autopar.ir.packed_order``).
    """

    sight: Sight
    lengths: tuple[int, int]
    zigzag_ranks: int
    sizes: tuple[int, ...]
    ring: tuple[bool, ...]
    by_documents: bool = False

    @property
    def ring_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups around which keys are passed."""
        return tuple(size for size, cuts in zip(self.sizes, self.ring, strict=True) if cuts)

    def ring_place(self, place: tuple[int, ...]) -> tuple[int, ...]:
        """Coordinates of a rank in those groups."""
        return tuple(own for own, cuts in zip(place, self.ring, strict=True) if cuts)

    def queries(self, place: tuple[int, ...]) -> tuple[Span, ...]:
        """Positions of the queries of the rank at ``place``."""
        return spans(self.lengths[0], self.zigzag_ranks, number_of(place, self.sizes), prod(self.sizes))

    def keys(self, holder: tuple[int, ...]) -> tuple[Span, ...]:
        """Positions of the keys of the rank at ``holder`` of the ring, put in natural order."""
        return joined(self._keys_as_stored(holder))

    def order_of_keys(self, holder: tuple[int, ...]) -> tuple[Span, ...]:
        """Parts of that rank's piece as it is stored, in natural order."""
        return natural_order(self._keys_as_stored(holder))

    @property
    def order_of_all_keys(self) -> tuple[Span, ...]:
        """``order_of_keys`` of all pieces, one after the other as they are stored."""
        starts = ((holder, self.stored_keys(holder).start) for holder in product(*map(range, self.ring_sizes)))
        return tuple(
            Span(start + part.start, start + part.stop)
            for holder, start in starts
            for part in self.order_of_keys(holder)
        )

    def _keys_as_stored(self, holder: tuple[int, ...]) -> tuple[Span, ...]:
        return spans(self.lengths[1], self.zigzag_ranks, number_of(holder, self.ring_sizes), prod(self.ring_sizes))

    @property
    def reorders(self) -> bool:
        """Whether a piece of keys is not stored in natural order."""
        return self.zigzag_ranks > prod(self.ring_sizes)

    def stored_queries(self, place: tuple[int, ...]) -> Span:
        """Where the queries of the rank at ``place`` lie among all queries."""
        return stored(self.lengths[0], number_of(place, self.sizes), prod(self.sizes))

    def stored_keys(self, holder: tuple[int, ...]) -> Span:
        """Where the keys of the rank at ``holder`` of the ring lie among all keys."""
        return stored(self.lengths[1], number_of(holder, self.ring_sizes), prod(self.ring_sizes))

    def places(self) -> Iterator[tuple[int, ...]]:
        """The last first: of causal attention it sees most."""
        return product(*(reversed(range(size)) for size in self.sizes))


@lru_cache(maxsize=256)
def hops_needed(shape: RingShape) -> tuple[int, ...]:
    """The hops after which no rank meets a key that one of its queries sees are left out."""
    sizes = shape.ring_sizes
    every = hops(sizes)
    if shape.by_documents:
        return every
    taken = [every.count(group) for group in range(len(sizes))]
    for number in range(len(every), 0, -1):
        for place in shape.places():
            keys = shape.keys(_turned(shape.ring_place(place), sizes, taken))
            if blocks(shape.sight, shape.queries(place), keys):
                return every[:number]
        taken[every[number - 1]] -= 1
    return ()


class BlockWork(NamedTuple):
    """Work of a rank over all steps of a ring: blocks, and what of its queries and of a piece of keys they cover.

    rows and columns: 1.0 is all queries of the rank, or one piece of keys, once.
    """

    number: float
    rows: float
    columns: float


@lru_cache(maxsize=1024)
def block_work(shape: RingShape) -> BlockWork:
    """Work of the last rank but one, which has most blocks in zigzag layout and nearly so in natural order.

    Of a long ring some steps stand for all but the first.
    """
    taken, count = hops_needed(shape), prod(shape.sizes)
    place = next(islice(shape.places(), min(1, count - 1), None))
    number, home = number_of(place, shape.sizes), shape.ring_place(place)
    own = _work_of(shape, number, home)
    others = range(1, len(taken) + 1, -(-len(taken) // _STEPS) or 1)
    if not others:
        return own
    met = [_work_of(shape, number, owner(home, shape.ring_sizes, taken[:step])) for step in others]
    weight = len(taken) / len(met)
    return BlockWork(*(first + weight * sum(rest) for first, *rest in zip(own, *met, strict=True)))


def _work_of(shape: RingShape, number: int, holder: tuple[int, ...]) -> BlockWork:
    """Of the queries of one rank with one piece of keys."""
    of_queries, of_keys = (number, prod(shape.sizes)), (number_of(holder, shape.ring_sizes), prod(shape.ring_sizes))
    return _work_of_pieces(shape.sight, shape.lengths, shape.zigzag_ranks, of_queries, of_keys)


@lru_cache(maxsize=4096)
def _work_of_pieces(
    sight: Sight, lengths: tuple[int, int], zigzag_ranks: int, of_queries: tuple[int, int], of_keys: tuple[int, int]
) -> BlockWork:
    """Pieces by number and count. Ranks that share the queries alike in whatever axes have the same work."""
    queries, keys = (
        spans(length, zigzag_ranks, *piece) for length, piece in zip(lengths, (of_queries, of_keys), strict=True)
    )
    found = blocks(sight, queries, joined(keys))
    # Of fewer positions than pieces some have none.
    own, seen = (max(1, sum(map(len, piece))) for piece in (queries, keys))
    return BlockWork(
        len(found),
        sum(len(block.rows) for block in found) / own,
        sum(len(block.columns) for block in found) / seen,
    )


def zigzag_ranks_for(lengths: tuple[int, int], count: int, *, balanced: bool) -> int:
    """``zigzag_ranks`` of an attention's sequence that ``count`` ranks share: ``count`` if asked for and it divides,
    else 1."""
    return count if balanced and lengths[0] == lengths[1] and lengths[0] % (2 * count) == 0 else 1


@lru_cache(maxsize=4096)
def imbalance(sight: Sight, lengths: tuple[int, int], zigzag_ranks: int, count: int) -> float:
    """Work of the rank that has most of it over the mean, when ``count`` ranks share the queries."""
    keys = Span(0, lengths[1])
    work = [
        sum(sight.num_pairs(queries, keys) for queries in spans(lengths[0], zigzag_ranks, index, count))
        for index in range(count)
    ]
    return max(work) * count / sum(work) if sum(work) else 1.0
