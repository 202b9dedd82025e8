"""The part of an attention mask that keeps documents apart which are packed into one row.

    ids (B, S)                  eq(ids[:, None, :, None], ids[:, None, None, :])
    positions (B, S)            le(positions[:, None, None, :], positions[:, None, :, None])
                                ids = cumsum(diff(positions) != 1)

A key is seen by queries with its id. Where ids count the places at which positions do not go up by one, positions go up
by one within a document, so that to compare them there is to compare places in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autopar.ir.building import dtype_of, shape_of
from autopar.ir.sizes import same_sizes

aten = torch.ops.aten

Side = Literal["queries", "keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """documents: (B, S) or (S,), the same for positions of one document. causal, window: how places restrict keys
    within one. others: the parts of the mask that are left."""

    documents: fx.Node
    causal: bool
    window: int | None
    others: tuple[fx.Node, ...]


def find_packing(parts: Sequence[fx.Node], is_constant: Callable[[fx.Node], bool]) -> Packing | None:
    """How the parts of a boolean mask on scores (.., S, S) keep documents apart that a batch brings along.

    is_constant: of a part, which says the same of every batch. None if no other part keeps documents apart.
    """
    for part in parts:
        documents = _compared(part, {aten.eq.Tensor}, {aten.eq.Tensor})
        if documents is not None and not is_constant(part):
            return _with_order(documents[0], [other for other in parts if other is not part])
    return None


def _with_order(documents: fx.Node, parts: Sequence[fx.Node]) -> Packing:
    causal, window, others = False, None, list[fx.Node]()
    positions = _counted_in(documents)
    for part in parts:
        order = _compared(part, {aten.le.Tensor}, {aten.ge.Tensor})
        reach = _compared(part, {aten.gt.Tensor}, {aten.lt.Tensor})
        if positions is not None and order == (positions, 0):
            causal = True
        elif positions is not None and reach is not None and reach[0] is positions and reach[1] > 0 and window is None:
            window = reach[1]
        else:
            others.append(part)
    return Packing(documents=documents, causal=causal, window=window, others=tuple(others))


def _compared(part: fx.Node, keys_first: set[object], queries_first: set[object]) -> tuple[fx.Node, int] | None:
    """x and w, where a part compares x of a key with x - w of a query, by an op with the key or the query first."""
    if len(part.args) != 2 or not all(isinstance(operand, fx.Node) for operand in part.args):
        return None
    one, other = (_placed(operand) for operand in part.args)  # type: ignore[arg-type]  # nodes, as was asked
    if one is None or other is None:
        return None
    for ops, (key, query) in ((keys_first, (one, other)), (queries_first, (other, one))):
        if part.target in ops and (key[1], query[1]) == ("keys", "queries") and key[0] is query[0] and not key[2]:
            return key[0], query[2]
    return None


def _placed(node: fx.Node) -> tuple[fx.Node, Side, int] | None:
    """x (B, S) or (S,), the side of the scores along which ``node`` has it, and what is subtracted from it."""
    shape = shape_of(node)
    if len(shape) < 2 or (shape[-1] == 1) == (shape[-2] == 1):
        return None
    side: Side = "queries" if shape[-1] == 1 else "keys"
    source, subtracted = _unplaced(node), 0
    if source.target is aten.sub.Tensor and len(source.args) == 2 and isinstance(source.args[1], int):
        subtracted, operand = source.args[1], source.args[0]
        assert isinstance(operand, fx.Node)
        source = _unplaced(operand)
    own = shape_of(source)
    length = shape[-2] if side == "queries" else shape[-1]
    fits = len(own) in (1, 2) and own[-1] == length and _long(own) == _long(shape)
    return (source, side, subtracted) if fits and not dtype_of(source).is_floating_point else None


def _unplaced(node: fx.Node) -> fx.Node:
    """What ``node`` is with dimensions of size 1 put in."""
    while node.target in (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.expand.default):
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        if not same_sizes(_long(shape_of(operand)), _long(shape_of(node))):
            break
        node = operand
    return node


def _long(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _counted_in(documents: fx.Node) -> fx.Node | None:
    """The positions, if ``documents`` count the places at which these do not go up by one."""
    if documents.target is not aten.cumsum.default or not _is_last(documents, 1):
        return None
    jumps = documents.args[0]
    if not isinstance(jumps, fx.Node) or jumps.target is not aten.ne.Scalar or jumps.args[1] != 1:
        return None
    steps = jumps.args[0]
    if not isinstance(steps, fx.Node) or steps.target is not aten.diff.default:
        return None
    count = steps.args[1] if len(steps.args) > 1 else 1
    positions = steps.args[0]
    if not isinstance(positions, fx.Node) or count != 1 or not _is_last(steps, 2):
        return None
    return positions if same_sizes(shape_of(positions), shape_of(documents)) else None


def _is_last(node: fx.Node, place: int) -> bool:
    """Whether the argument at ``place`` is the last dimension."""
    dim = node.args[place] if len(node.args) > place else -1
    return dim in (-1, len(shape_of(node)) - 1)
