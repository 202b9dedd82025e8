"""The gate of an expert, between its two products, read as one expression.

gate, value = split(up, i, -1)                        silu, gated
mul(silu(gate), value)

gate, value = up[:, ::2], up[:, 1::2]                 "mul(add(value, 1), mul(clamp(gate, None, 7.0), ..))",
mul(add(value, 1), mul(clamp(gate, None, 7.0), ..))    gated, interleaved
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import fx

from autopar.ir.building import shape_of
from autopar.ir.gates import GATE, VALUE, expression_of
from autopar.ir.graph import is_tensor
from autopar.ir.torch_private import TO_COPY, OpOverload
from autopar.passes.normalise.constants import is_pointwise

aten = torch.ops.aten

# Expressions that have a name of their own, of experts with and without a gate.
_NAMES = {f"{name}(gate)": name for name in ("silu", "gelu", "relu", "sigmoid", "tanh")}
_NAMES["gelu(gate, approximate='tanh')"] = "gelu_tanh"
_NAMES["gelu(gate, approximate='none')"] = "gelu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """source: the result of the first product. activation, gated, interleaved: as ``composite.moe`` takes them."""

    source: fx.Node
    activation: str
    gated: bool
    interleaved: bool


def read_gate(inner: Any, is_product: Callable[[fx.Node], bool]) -> Gate | None:
    """The expression that makes ``inner`` of the halves of a product's result, or of all of it; None if it is none."""
    reader = _Reader(is_product)
    text = reader.read(inner)
    if text is None or len(reader.sources) != 1:
        return None
    (source, interleaved), halves = next(iter(reader.sources)), reader.halves
    if halves not in ({None}, {0, 1}):
        return None
    gated = halves == {0, 1}
    for expression, name in _NAMES.items():
        if text == expression or (gated and text in (f"mul({expression}, value)", f"mul(value, {expression})")):
            text = name if gated == (text != expression) else text
            break
    return Gate(source=source, activation=text, gated=gated, interleaved=bool(interleaved))


@dataclass(slots=True)
class _Reader:
    """sources: products that the halves are of, and whether these are interleaved. halves: those that are read."""

    is_product: Callable[[fx.Node], bool]
    sources: set[tuple[fx.Node, bool | None]] = field(default_factory=set)
    halves: set[int | None] = field(default_factory=set)

    def read(self, node: Any) -> str | None:
        if not isinstance(node, fx.Node) or not is_tensor(node):
            return None
        half = _half(node)
        if half is not None or self.is_product(node):
            source, number, interleaved = half or (node, None, None)
            self.sources.add((source, interleaved))
            self.halves.add(number)
            return VALUE if number == 1 else GATE
        target = node.target
        if not is_pointwise(node) or target is TO_COPY or not isinstance(target, OpOverload):
            return None
        arguments = [self.read(a) if isinstance(a, fx.Node) else a for a in node.args]
        unread = any(isinstance(a, fx.Node) and text is None for a, text in zip(node.args, arguments, strict=True))
        constants = [a for a in node.args if not isinstance(a, fx.Node)]
        if unread or not all(map(_can_be_written, (*constants, *node.kwargs.values()))):
            return None
        return expression_of(target.overloadpacket.__name__, tuple(arguments), node.kwargs)


def _can_be_written(constant: Any) -> bool:
    finite = not isinstance(constant, float) or isfinite(constant)
    return constant is None or (isinstance(constant, (bool, int, float, str)) and finite)


def _half(node: fx.Node) -> tuple[fx.Node, int, bool] | None:
    """(x, number, whether interleaved), if the node is the first (0) or second (1) half of x's last dimension."""
    if node.target is operator.getitem:
        split, number = node.args
        assert isinstance(split, fx.Node)
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default) or number not in (0, 1):
            return None
        source, dim = split.args[0], split.args[2] if len(split.args) > 2 else 0
        interleaved = False
    elif node.target is aten.slice.Tensor and len(node.args) > 1:
        arguments: tuple[Any, ...] = (*node.args, *(None, None, 1)[len(node.args) - 2 :])
        source, dim, begin, _, step = arguments
        size, begin, interleaved = shape_of(source)[-1], begin or 0, step == 2
        if step not in (1, 2) or begin not in ((0, 1) if interleaved else (0, size // 2)):
            return None
        number = begin if interleaved else int(begin > 0)
    else:
        return None
    assert isinstance(source, fx.Node) and isinstance(number, int)
    whole = shape_of(source)
    halved = dim in (-1, len(whole) - 1) and shape_of(node)[-1] * 2 == whole[-1]
    return (source, number, interleaved) if halved else None
