"""Attention spelt out becomes ``scaled_dot_product_attention``, which ``attention.py`` takes further.

    s = div(matmul(q, transpose(k, -2, -1)), 8.0)
    p = dropout(softmax(masked_fill(s, unseen, -inf), -1), 0.1)
    matmul(p, v)                                          scaled_dot_product_attention(q, k, v, ~unseen, 0.1,
                                                                                       scale=0.125)

    softmax(cat([s, sinks], -1), -1)[..., :-1]            the weights of an attention with sinks

The scores are never stored then. Scores that something else reads are left alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, only_user, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops import composite
from autopar.ir.torch_private import SAFE_SOFTMAX, TO_COPY, FakeTensorMode
from autopar.passes.contract import Pass
from autopar.passes.normalise.masks import NEVER

aten = torch.ops.aten

# The second gives zeros where no key is seen.
_SOFTMAX = (aten.softmax.int, SAFE_SOFTMAX)

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_BOUNDS = (aten.maximum.default, aten.max.other, aten.clamp.default, aten.clamp_min.default)


@dataclass(frozen=True)
class FuseEagerAttention(Pass[CapturedModel]):
    """softmax(q k^T * scale + mask) v as one op."""

    name: ClassVar[str] = "fuse-eager-attention"
    requires: ClassVar[frozenset[str]] = frozenset({"joined views"})
    provides: ClassVar[frozenset[str]] = frozenset({"fused attention"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"kinds of masks"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            found = _match(node)
            if found is not None:
                _rewrite(graph, mode, node, found)
        return captured


@dataclass(slots=True)
class _Attention:
    """bounded: whether masked scores were brought back to the smallest number of their dtype. sinks: (heads,), the
    scores of a key that is seen by all and has no value. conditions: (mask, whether True means seen, what unseen scores
    are set to); biases: added to the scores.
    """

    v: Any = None
    q: Any = None
    k: Any = None
    k_transposed: Any = None
    scale: float = 1.0
    dropout_p: float = 0.0
    bounded: bool = False
    sinks: fx.Node | None = None
    conditions: list[tuple[fx.Node, bool, float]] = field(default_factory=list)
    biases: list[fx.Node] = field(default_factory=list)

    def is_plain(self) -> bool:
        """Whether one mask at most was added, so that a bound on the masked scores changes nothing."""
        return not self.bounded or len(self.biases) + len(self.conditions) <= 1


def _match(product: fx.Node) -> _Attention | None:
    if product.target not in _PRODUCTS or len(shape_of(product)) not in (3, 4):
        return None
    found = _Attention(v=product.args[1])
    weights: Any = _uncast(product.args[0], product)
    if weights is not None and weights.target is aten.dropout.default:
        found.dropout_p = weights.args[1]
        weights = _uncast(weights.args[0], weights)
    dropped = None if weights is None else _dropped_column(weights)
    if dropped is not None:
        weights = _uncast(weights.args[0], weights)
    if weights is None or weights.target not in _SOFTMAX or not _private(weights):
        return None
    if weights.args[1] not in (-1, len(shape_of(weights)) - 1):
        return None
    shifted, scores = weights.args[0], _unshifted(weights.args[0])
    free = {scores} if scores is not shifted else set()
    if dropped is not None:
        scores, found.sinks = _apart(scores, dropped)
    while isinstance(scores, fx.Node) and (_private(scores) or scores in free):
        if scores.target in _PRODUCTS:
            return found if _take_product(found, scores) and found.is_plain() else None
        following = _take(found, scores)
        if following is None:
            return None
        scores = following
    return None


def _private(node: fx.Node) -> bool:
    return only_user(node) is not None


def _uncast(node: Any, user: fx.Node) -> fx.Node | None:
    """The node, or what it casts to the dtype of its user."""
    if isinstance(node, fx.Node) and node.target is TO_COPY and _private(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and _private(node) else None


def _dropped_column(node: fx.Node) -> int | None:
    """0 or -1, if the node is its operand without the first or the last entry of the last dimension."""
    if node.target is not aten.slice.Tensor or len(node.args) < 3:
        return None
    arguments: tuple[Any, ...] = (*node.args, *(None, 1)[len(node.args) - 3 :])
    source, dim, start, _, step = arguments
    rank, size = len(shape_of(source)), shape_of(source)[-1]
    if dim not in (-1, rank - 1) or step != 1 or shape_of(node)[-1] != size - 1:
        return None
    return 0 if start == 1 else -1


def _unshifted(scores: Any) -> Any:
    """Scores before their maximum was subtracted, which a softmax does not mind."""
    if not isinstance(scores, fx.Node) or scores.target is not aten.sub.Tensor or scores.kwargs:
        return scores
    plain, top = scores.args
    if not isinstance(top, fx.Node) or shape_of(top) != (*shape_of(scores)[:-1], 1):
        return scores
    if isinstance(top, fx.Node) and top.target is operator.getitem and top.args[1] == 0:
        top = top.args[0]
    if not isinstance(top, fx.Node) or top.target not in (aten.max.dim, aten.amax.default) or top.args[0] is not plain:
        return scores
    dims = top.args[1] if isinstance(top.args[1], (list, tuple)) else [top.args[1]]
    return plain if list(dims) in ([-1], [len(shape_of(scores)) - 1]) and _only(plain, {scores, top}) else scores


def _only(node: Any, users: set[fx.Node]) -> bool:
    return isinstance(node, fx.Node) and set(node.users) <= users


def _apart(node: Any, place: int) -> tuple[Any, fx.Node | None]:
    """Scores (B, H, S, T) and the sinks that they are concatenated with, which are first (0) or last in dimension 3."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default or len(shape_of(node)) != 4:
        return None, None
    parts, dim = (*node.args, 0)[:2]
    if dim not in (-1, 3) or not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None, None
    column, scores = (parts[0], parts[1]) if place == 0 else (parts[1], parts[0])
    assert isinstance(column, fx.Node)
    if shape_of(column)[-1] != 1:
        return None, None
    while column.target is aten.expand.default:
        (column,) = column.all_input_nodes
    by_head = (1, shape_of(node)[1], 1, 1)
    return (scores, column) if (1,) * (4 - len(shape_of(column))) + shape_of(column) == by_head else (None, None)


def _take(found: _Attention, node: fx.Node) -> Any:
    """Note what one op does to the scores; returns the scores before it, None if it is something else."""
    args, target = node.args, node.target
    if target is TO_COPY:
        return args[0]
    if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        factor = args[1]
        if not isinstance(factor, (int, float)) or factor <= 0:
            return None
        found.scale *= factor if target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / factor
        return args[0]
    if target in _BOUNDS and _bound(node) is not None:
        found.bounded = True
        return args[0]
    if target is aten.add.Tensor and not node.kwargs:
        scores, bias = args
        if not _is_scores(scores):
            scores, bias = bias, scores
        if not isinstance(bias, fx.Node) or not _is_scores(scores) or found.scale != 1.0:
            return None
        found.biases.append(bias)
        return scores
    if target is aten.masked_fill.Scalar and _is_never(args[2]):
        found.conditions.append((args[1], False, args[2]))  # type: ignore[arg-type]
        return args[0]
    if target is aten.where.ScalarOther and _is_never(args[2]):
        found.conditions.append((args[0], True, args[2]))  # type: ignore[arg-type]
        return args[1]
    return None


def _bound(node: fx.Node) -> float | None:
    """The number that scores are kept from falling below, if a masked score does not come above it."""
    least: Any = node.args[1] if len(node.args) > 1 else None
    if isinstance(least, fx.Node):
        value = least.meta.get("value")
        filled = least.target in (aten.full.default, aten.scalar_tensor.default)
        least = least.args[-1] if filled else value.item() if value is not None and value.numel() == 1 else None
    above = node.target is aten.clamp.default and (len(node.args) > 2 or node.kwargs)
    return least if _is_never(least) and not above else None


def _is_scores(node: Any) -> bool:
    """Whether a chain of one-user ops leads back to a product."""
    while isinstance(node, fx.Node) and _private(node) and node.args:
        if node.target in _PRODUCTS:
            return True
        node = node.args[1] if node.target is aten.where.ScalarOther else node.args[0]
    return False


def _is_never(value: Any) -> bool:
    return isinstance(value, (int, float)) and value <= NEVER


def _take_product(found: _Attention, product: fx.Node) -> bool:
    q, kt = product.args[:2]
    if not isinstance(kt, fx.Node) or not isinstance(q, fx.Node):
        return False
    rank = len(shape_of(kt))
    found.q, found.k_transposed = q, kt
    if kt.target is aten.transpose.int and {d % rank for d in kt.args[1:3]} == {rank - 1, rank - 2}:  # type: ignore[operator]
        found.k = kt.args[0]
    return rank == len(shape_of(q)) == len(shape_of(found.v))


def _rewrite(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, found: _Attention) -> None:
    with graph.inserting_before(node):
        k, v = found.k, found.v
        if k is None:
            k = add_call(graph, mode, aten.transpose.int, (found.k_transposed, -2, -1), like=node)
        mask = _mask(graph, mode, node, found)
        options: dict[str, Any] = {"scale": found.scale}
        if found.sinks is not None:
            sinks = add_call(graph, mode, aten.reshape.default, (found.sinks, [shape_of(node)[1]]), like=node)
            options |= {"kind": "full" if mask is None else "mask", "dropout_p": found.dropout_p}
            result = add_call(graph, mode, composite.attention, (found.q, k, v, mask, sinks), options, like=node)
        else:
            args = (found.q, k, v, mask, found.dropout_p, False)
            result = add_call(graph, mode, aten.scaled_dot_product_attention.default, args, options, like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _mask(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, found: _Attention) -> fx.Node | None:
    """One mask: boolean if there are conditions only, else added to the scores."""
    seen: fx.Node | None = None
    never = float("-inf")
    for condition, true_is_seen, value in found.conditions:
        if not true_is_seen:
            condition = add_call(graph, mode, aten.logical_not.default, (condition,), like=node)
        if dtype_of(condition) != torch.bool:
            condition = add_call(graph, mode, TO_COPY, (condition,), {"dtype": torch.bool}, like=node)
        never = max(never, value)
        seen = (
            condition if seen is None else add_call(graph, mode, aten.logical_and.default, (seen, condition), like=node)
        )
    total: fx.Node | None = None
    for bias in found.biases:
        total = bias if total is None else add_call(graph, mode, aten.add.Tensor, (total, bias), like=node)
    if total is None or seen is None:
        return total if seen is None else seen
    return add_call(graph, mode, aten.where.ScalarOther, (seen, total, never), like=node)
