"""The meaning of an attention mask: a kind, and the part of it that depends on data.

A mask is a conjunction of boolean parts, or a sum of additive ones. The constant parts are compared with the
kinds that ``composite.attention`` knows: by the interval of keys that each query sees where that is known
(``row_intervals``); otherwise they are evaluated, in blocks of rows and on as little of the batch as decides them.
What is left, a padding mask or a learned bias, stays an operand in its smallest broadcast shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, fx

from autopar.ir.building import add_call, dtype_of, shape_of
from autopar.ir.ops.composite import AttentionKind
from autopar.ir.sequence import Span
from autopar.ir.torch_private import FakeTensorMode
from autopar.passes.normalise.constants import Box, ConstantEvaluator, TooLarge
from autopar.passes.normalise.documents import find_packing
from autopar.passes.normalise.row_intervals import RowIntervals, row_intervals

aten = torch.ops.aten

_AND = {
    aten.__and__.Tensor,
    aten.bitwise_and.Tensor,
    aten.logical_and.default,
}
# Additive masks write "never" as the smallest number of some dtype; -1e4 was usual for float16.
NEVER = -9999.0
# Elements of a mask that are looked at together, few enough for a cache, and altogether. Beyond, first and last rows
# and a sample of rows and columns decide, with as many elements of rows as of columns.
_BLOCK_NUMEL = 1 << 20
_EDGE_NUMEL = 1 << 22
_TOTAL_NUMEL = 1 << 27
_SAMPLE_NUMEL = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskMeaning:
    """kind, window and documents as in ``composite.attention``; parts: what else restricts or biases the scores."""

    kind: AttentionKind
    window: int | None = None
    parts: tuple[fx.Node, ...] = ()
    documents: fx.Node | None = None


@dataclass(slots=True)
class MaskReader:
    """Finds the meaning of masks of one graph; remembers it, since all layers share a mask."""

    evaluator: ConstantEvaluator = field(default_factory=ConstantEvaluator)
    _known: dict[tuple[fx.Node, bool, int, int], MaskMeaning] = field(default_factory=dict)

    def read(self, mask: fx.Node, *, queries: int, keys: int, causal: bool = False) -> MaskMeaning:
        """The meaning of a mask on scores (.., queries, keys). causal: a causal mask applies as well."""
        key = (mask, causal, queries, keys)
        if key not in self._known:
            self._known[key] = self._read(mask, queries, keys, causal)
        return self._known[key]

    def _read(self, mask: fx.Node, queries: int, keys: int, causal: bool) -> MaskMeaning:
        parts = list(self._parts(mask))
        packing = (
            find_packing(parts, self.evaluator.is_constant)
            if queries == keys and dtype_of(mask) == torch.bool
            else None
        )
        if packing is None:
            return self._of_parts(mask, parts, queries, keys, causal)
        rest = self._of_parts(mask, list(packing.others), queries, keys, causal or packing.causal)
        if packing.window is None:
            return replace(rest, documents=packing.documents)
        if rest.kind == "causal" and not rest.parts:
            return MaskMeaning(kind="sliding", window=packing.window, documents=packing.documents)
        return self._of_parts(mask, [mask], queries, keys, causal)

    def _of_parts(self, mask: fx.Node, parts: list[fx.Node], queries: int, keys: int, causal: bool) -> MaskMeaning:
        constant = [p for p in parts if self.evaluator.is_constant(p) and self._is_condition(p)]
        varying = tuple(p for p in parts if p not in constant)
        base: AttentionKind = "causal" if causal else "full"
        if not constant:
            return MaskMeaning(kind=base if causal or not varying else "mask", parts=varying)
        meaning = self._classify(constant, queries, keys)
        if meaning is None or (causal and meaning.kind == "sliding"):
            if {dtype_of(p) == torch.bool for p in parts} == {True, False}:
                parts = [mask]  # conditions and biases do not add up: keep what combines them
            return MaskMeaning(kind="causal" if causal else "mask", parts=tuple(parts))
        kind = base if meaning.kind == "full" else meaning.kind
        if kind == "full" and varying:
            kind = "mask"
        return MaskMeaning(kind=kind, window=meaning.window, parts=varying)

    def _parts(self, mask: fx.Node) -> Iterator[fx.Node]:
        """Conjuncts of a boolean mask, addends of an additive one, without their expansions.

        A bias that a constant condition blots out, ``where(condition, bias, never)``, is both.
        """
        while _is_expansion(mask):
            mask = mask.args[0]  # type: ignore[assignment]
        operands = [a for a in mask.args[:2] if isinstance(a, fx.Node)]
        splits = mask.target in _AND if dtype_of(mask) == torch.bool else mask.target is aten.add.Tensor
        if mask.target is aten.where.ScalarOther and _is_never(mask.args[2]):
            splits = self.evaluator.is_constant(operands[0])
        if splits and len(operands) == 2 and not mask.kwargs:
            for operand in operands:
                yield from self._parts(operand)
        else:
            yield mask

    def _is_condition(self, part: fx.Node) -> bool:
        """Whether a constant part says which keys are seen, and is no bias: its last row has 0 and "never" alone."""
        shape = shape_of(part)
        if dtype_of(part) == torch.bool or len(shape) < 2:
            return True
        try:
            lead = tuple((0, size) for size in self._lead(part))
            _as_boolean(self.evaluator.evaluate(part, (*lead, (shape[-2] - 1, shape[-2]), (0, shape[-1]))))
        except TooLarge:
            return False
        return True

    def _classify(self, parts: list[fx.Node], queries: int, keys: int) -> MaskMeaning | None:
        """The kind that the constant parts together are, None if they are no kind."""
        candidates: dict[AttentionKind, int | None] = {"full": None}
        if queries == keys:
            candidates["causal"] = None
        try:
            intervals = row_intervals(parts, queries, keys, self.evaluator)
            if intervals is not None:
                return _of_intervals(intervals, queries, keys)
            last = self._seen(parts, Span(queries - 1, queries), Span(0, keys), queries, keys)
            window = int(last.reshape(-1, keys)[0].sum())
            if queries == keys and 0 < window < keys:
                candidates["sliding"] = window
            for rows, columns in _looked_at(queries, keys, max(prod(self._lead(p)) for p in parts)):
                seen = self._seen(parts, rows, columns, queries, keys)
                candidates = {k: w for k, w in candidates.items() if _agrees(seen, k, w, rows, columns)}
                if not candidates:
                    return None
        except TooLarge:
            return None
        kind = next(iter(candidates))
        return MaskMeaning(kind=kind, window=candidates[kind])

    def _lead(self, part: fx.Node) -> list[int]:
        """Sizes of the dimensions before (queries, keys) along which a part varies."""
        shape, uniform = shape_of(part), self.evaluator.uniform(part)
        return [1 if d in uniform else size for d, size in enumerate(shape[:-2])]

    def _seen(self, parts: list[fx.Node], rows: Span, columns: Span, queries: int, keys: int) -> Tensor:
        """Which of the keys ``columns`` the queries ``rows`` see: boolean, (.., len(rows), len(columns))."""
        seen: Tensor | None = None
        for part in parts:
            shape = shape_of(part)
            lead: Box = tuple((0, size) for size in self._lead(part))
            tail: Box = tuple((0, size) for size in shape[-2:])
            if tail and shape[-1] == keys:
                tail = (*tail[:-1], (columns.start, columns.stop))
            if len(shape) >= 2 and shape[-2] == queries and queries > 1:
                tail = ((rows.start, rows.stop), tail[1])
            value = self.evaluator.evaluate(part, (*lead, *tail))
            own = _as_boolean(value)
            seen = own if seen is None else seen & own
        assert seen is not None
        return seen.expand(torch.broadcast_shapes(seen.shape, (len(rows), len(columns))))


def _of_intervals(seen: RowIntervals, queries: int, keys: int) -> MaskMeaning | None:
    if seen.is_full(keys):
        return MaskMeaning(kind="full")
    window = int(seen.stop[-1] - seen.start[-1])
    if queries != keys or window < 1 or not seen.is_window(window):
        return None
    return MaskMeaning(kind="causal") if window == keys else MaskMeaning(kind="sliding", window=window)


def _looked_at(queries: int, keys: int, lead: int) -> Iterator[tuple[Span, Span]]:
    """Rows and columns of a mask that decide of what kind it is: all of a small one.

    Of a large one the first and the last rows, and rows and columns spread evenly between them, whole: the longer the
    mask, the fewer, so that the work grows with neither its area nor, up to millions of positions, its length.
    """
    rows = max(_BLOCK_NUMEL // (keys * lead), 1)
    if lead * queries * keys <= _TOTAL_NUMEL:
        yield from ((Span(low, min(low + rows, queries)), Span(0, keys)) for low in range(0, queries, rows))
        return
    edge = max(_EDGE_NUMEL // (keys * lead), 1)
    yield Span(0, edge), Span(0, keys)
    yield Span(queries - edge, queries), Span(0, keys)
    yield from ((row, Span(0, keys)) for row in _spread(queries, _SAMPLE_NUMEL // (keys * lead)))
    yield from ((Span(0, queries), column) for column in _spread(keys, _SAMPLE_NUMEL // (queries * lead)))


def _spread(size: int, count: int) -> list[Span]:
    """``count`` of ``size`` positions, 8 at least, the last one among them. They are an odd number apart, so that they
    meet each place within blocks of a power of two."""
    stride = max(size // max(count, 8), 1) | 1
    return [Span(at, at + 1) for at in range(size - 1, -1, -stride)]


def _is_expansion(mask: fx.Node) -> bool:
    """Whether broadcasting alone makes a mask of its operand."""
    if mask.target is aten.expand.default:
        return True
    if mask.target not in (aten.unsqueeze.default, aten.reshape.default):
        return False
    assert isinstance(mask.args[0], fx.Node)
    before, after = shape_of(mask.args[0]), shape_of(mask)
    return after == (1,) * (len(after) - len(before)) + before


def _is_never(value: object) -> bool:
    return isinstance(value, float) and value <= NEVER


def _as_boolean(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value
    never, zero = value <= NEVER, value == 0
    if not bool((never | zero).all()):
        raise TooLarge  # a bias, not a mask
    return zero


def _agrees(seen: Tensor, kind: AttentionKind, window: int | None, rows: Span, columns: Span) -> bool:
    # NumPy compares booleans several times as fast as torch, and a triangle is made faster than its condition is.
    if kind == "full":
        return bool(seen.numpy().all())
    expected = torch.ones(len(rows), len(columns), dtype=torch.bool).tril_(rows.start - columns.start)
    if window is not None:
        expected.triu_(rows.start - columns.start - window + 1)
    return bool((seen.numpy() == expected.numpy()).all())


def joined(graph: fx.Graph, mode: FakeTensorMode, parts: tuple[fx.Node, ...], like: fx.Node) -> fx.Node:
    """One mask operand of four dimensions from the parts of a mask."""
    assert parts
    mask = parts[0]
    for part in parts[1:]:
        op = aten.logical_and.default if dtype_of(mask) == torch.bool else aten.add.Tensor
        mask = add_call(graph, mode, op, (mask, part), like=like)
    return mask


def smallest(
    graph: fx.Graph, mode: FakeTensorMode, part: fx.Node, evaluator: ConstantEvaluator, like: fx.Node
) -> fx.Node:
    """A part of a mask, cut to size 1 along leading dimensions where it does not vary, with four dimensions."""
    shape = shape_of(part)
    for dim in sorted(evaluator.uniform(part)):
        if dim < len(shape) - 2 and shape[dim] > 1:
            part = add_call(graph, mode, aten.slice.Tensor, (part, dim, 0, 1), like=like)
    shape = shape_of(part)
    if len(shape) < 4:
        part = add_call(graph, mode, aten.reshape.default, (part, [1] * (4 - len(shape)) + list(shape)), like=like)
    return part
