"""Sorting tokens by expert, grouped products and the way back become ``composite.moe``.

    chosen, order = sort(reshape(index, [T * K]))
    rows = x[order // K]
    ends = cumsum(histc(chosen, E))
    up = grouped_mm(rows, transpose(w_up), ends)
    down = grouped_mm(silu(up[:, :i]) * up[:, i:], transpose(w_down), ends)
    restored = (down * weights[order])[inverse(order)]
    sum(reshape(restored, [T, K, h]), 1)                  moe(x, index, weights, w_up, w_down, ..)

Data-dependent sorting couples all tokens in the trace; in the meaning, tokens are independent.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops import composite
from autopar.ir.torch_private import TO_COPY, FakeTensorMode, OpOverload, schema_of
from autopar.passes.contract import Pass
from autopar.passes.normalise.gates import Gate, read_gate
from autopar.passes.normalise.unflatten import before_flatten

aten = torch.ops.aten

# By name: the fallback op of transformers is registered only once that package is imported.
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}

_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)


@dataclass(frozen=True)
class RecogniseMoe(Pass[CapturedModel]):
    """One op per layer of experts."""

    name: ClassVar[str] = "recognise-moe"
    requires: ClassVar[frozenset[str]] = frozenset({"rows apart"})
    provides: ClassVar[frozenset[str]] = frozenset({"experts"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            if node.target is aten.sum.dim_IntList and node.args[1:] in (([1],), ([1], False)):
                found = _match(node)
                if found is not None:
                    _rewrite(graph, mode, node, found)
        return captured


@dataclass(frozen=True, slots=True)
class _Experts:
    x: fx.Node
    index: fx.Node
    weights: fx.Node
    w_up: fx.Node
    w_down: fx.Node
    b_up: fx.Node | None
    b_down: fx.Node | None
    gate: Gate


def _match(total: fx.Node) -> _Experts | None:
    """The region that ends in the sum over a token's experts."""
    restored = _source(total.args[0], aten.reshape.default)
    weighted, inverse = _indexed(restored)
    if weighted is None or weighted.target is not aten.mul.Tensor:
        return None
    down, spread = weighted.args[:2]
    spread = _source(spread, None, aten.unsqueeze.default)
    if not isinstance(down, fx.Node):
        return None
    flat_weights, order = _indexed(spread)
    if flat_weights is None or order is None or not _inverts(inverse, order):
        return None
    chosen_index = _sorted(order)
    down_product, b_down = _without_bias(down, order)
    inner, w_down, ends = _grouped(down_product)
    gate = read_gate(inner, lambda node: _grouped(_without_bias(node, order)[0])[2] is not None)
    if gate is None or chosen_index is None or ends is None:
        return None
    up_product, b_up = _without_bias(gate.source, order)
    rows, w_up, same_ends = _grouped(up_product)
    x, token = _indexed(rows)
    weights = _source(flat_weights, None, aten.reshape.default)
    if x is None or token is None or same_ends is not ends or weights is None or w_up is None or w_down is None:
        return None
    top_k = shape_of(weights)[-1]
    plausible = (
        prod(shape_of(chosen_index)) == prod(shape_of(weights))
        and shape_of(chosen_index)[-1] == top_k
        and _is_quotient(token, order, top_k)
        and _ends_of(ends, order, shape_of(w_up)[0])
        and shape_of(total) == shape_of(x)
        and len(shape_of(restored)) == 2  # type: ignore[arg-type]
        and shape_of(total.args[0]) == (shape_of(x)[0], top_k, shape_of(x)[1])  # type: ignore[arg-type]
    )
    if not plausible:
        return None
    return _Experts(x, chosen_index, weights, w_up, w_down, b_up, b_down, gate)


def _rewrite(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, found: _Experts) -> None:
    x, index, weights = found.x, found.index, found.weights
    wide = before_flatten(x)
    if wide is not None and shape_of(wide)[:-1] in (shape_of(index)[:-1], shape_of(weights)[:-1]):
        x = wide
    with graph.inserting_before(node):
        matrices = [
            m.args[0] if _is_transpose(m) else add_call(graph, mode, aten.transpose.int, (m, -2, -1), like=node)
            for m in (found.w_up, found.w_down)
        ]
        biases = (found.b_up, found.b_down) if found.b_up is not None or found.b_down is not None else ()
        chosen = [*shape_of(x)[:-1], shape_of(index)[-1]]
        index = add_call(graph, mode, aten.reshape.default, (index, chosen), like=node)
        weights = add_call(graph, mode, aten.reshape.default, (weights, chosen), like=node)
        options = {"activation": found.gate.activation, "gated": found.gate.gated}
        if found.gate.interleaved:
            options["interleaved"] = True
        result = add_call(graph, mode, composite.moe, (x, index, weights, *matrices, *biases), options, like=node)
        if shape_of(result) != shape_of(node):
            result = add_call(graph, mode, aten.reshape.default, (result, list(shape_of(node))), like=node)
    if dtype_of(result) == dtype_of(node):
        node.replace_all_uses_with(result)


def _source(node: Any, target: Any, *others: Any) -> fx.Node | None:
    """The operand of a view of one of the given kinds. None among them: or the node itself."""
    if not isinstance(node, fx.Node):
        return None
    if node.target in (target, *others):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return node if target is None else None


def _indexed(node: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """(x, index) of ``x[index]`` over the first dimension."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor:
        return None, None
    source, indices = node.args[:2]
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return None, None
    assert isinstance(source, fx.Node)
    return source, indices[0]


def _inverts(inverse: Any, order: fx.Node) -> bool:
    """``empty[order] = arange``, or ``argsort(order)``: the inverse of a permutation."""
    if not isinstance(inverse, fx.Node):
        return False
    if inverse.target is aten.index_put.default:
        indices, values = inverse.args[1:3]
        counts = isinstance(values, fx.Node) and values.target is aten.arange.default
        return isinstance(indices, (list, tuple)) and list(indices) == [order] and counts
    return inverse.target is aten.argsort.default and inverse.args[0] is order


def _sorted(order: fx.Node) -> fx.Node | None:
    """The expert choice (.., K) that ``order`` sorts."""
    source = order.args[0] if order.args else None
    if not isinstance(source, fx.Node):
        return None
    if order.target is operator.getitem and order.args[1] == 1 and source.target in _SORTS:
        return _source(source.args[0], aten.reshape.default)
    return _source(source, aten.reshape.default) if order.target in _ARGSORTS else None


def _without_bias(node: Any, order: fx.Node) -> tuple[Any, fx.Node | None]:
    """A product and the bias that was added per row: ``product + bias[chosen]``."""
    if isinstance(node, fx.Node) and node.target is aten.add.Tensor and not node.kwargs:
        bias, chosen = _indexed(node.args[1])
        if bias is not None and chosen is not None and _sorted_values(chosen, order):
            return node.args[0], bias
    return node, None


def _sorted_values(chosen: fx.Node, order: fx.Node) -> bool:
    return chosen.target is operator.getitem and chosen.args == (order.args[0], 0)


def _grouped(node: Any) -> tuple[Any, fx.Node | None, fx.Node | None]:
    """(rows, matrices, ends) of a grouped product."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, OpOverload):
        return None, None, None
    if schema_of(node.target).name not in _GROUPED:
        return None, None, None
    rows, matrices = node.args[:2]
    ends = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    assert isinstance(matrices, fx.Node)
    return rows, matrices, ends if isinstance(ends, fx.Node) else None


def _is_quotient(token: fx.Node, order: fx.Node, top_k: int) -> bool:
    if top_k == 1 and token is order:
        return True
    return token.target is aten.floor_divide.default and tuple(token.args[:2]) == (order, top_k)


def _ends_of(ends: fx.Node, order: fx.Node, num_experts: int) -> bool:
    """``cumsum(histc(chosen, num_experts, 0, num_experts - 1))``."""
    counts = ends.args[0] if ends.target is aten.cumsum.default else None
    if not isinstance(counts, fx.Node) or counts.target is not aten.histc.default:
        return False
    chosen = counts.args[0]
    if isinstance(chosen, fx.Node) and chosen.target is TO_COPY:
        chosen = chosen.args[0]
    exact: bool = tuple(counts.args[1:4]) == (num_experts, 0, num_experts - 1)
    return exact and isinstance(chosen, fx.Node) and _sorted_values(chosen, order)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.transpose.int and {d % 3 for d in node.args[1:3]} == {1, 2}  # type: ignore[operator]
