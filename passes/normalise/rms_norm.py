"""RMSNorm spelt out, or as ``aten.rms_norm``, becomes ``composite.rms_norm``.

    r = rsqrt(mean(pow(x, 2), [-1], True) + eps)
    mul(weight, mul(x, r))                                rms_norm(x, weight, eps)

Casts to float32 on the way in and back on the way out are part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.building import add_call, dtype_of, fake_mode_of, only_user, shape_of
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops import composite
from autopar.ir.torch_private import TO_COPY, FakeTensorMode
from autopar.passes.contract import Pass

aten = torch.ops.aten

_MUL = aten.mul.Tensor


@dataclass(frozen=True)
class RecogniseRmsNorm(Pass[CapturedModel]):
    """One op per RMSNorm."""

    name: ClassVar[str] = "recognise-rms-norm"
    provides: ClassVar[frozenset[str]] = frozenset({"norms"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"scaled sums"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        graph = captured.graph
        mode = fake_mode_of(graph)
        for node in list(call_nodes(graph)):
            if node.target is aten.rms_norm.default:
                _from_aten(graph, mode, node)
            elif node.target is aten.rsqrt.default:
                _from_parts(graph, mode, node)
        return captured


def _from_aten(graph: fx.Graph, mode: FakeTensorMode, node: fx.Node) -> None:
    x, shape = node.args[:2]
    weight = node.args[2] if len(node.args) > 2 else node.kwargs.get("weight")
    eps = node.args[3] if len(node.args) > 3 else node.kwargs.get("eps")
    assert isinstance(x, fx.Node) and isinstance(shape, (list, tuple))
    if len(shape) == 1:
        eps = torch.finfo(dtype_of(x)).eps if eps is None else eps
        _replace(graph, mode, node, x, weight, eps)


def _from_parts(graph: fx.Graph, mode: FakeTensorMode, rsqrt: fx.Node) -> None:
    found = _mean_square(rsqrt)
    if found is None:
        return
    wide, eps = found
    scaled = next((u for u in rsqrt.users if u.target is _MUL and set(u.args) == {wide, rsqrt}), None)
    if scaled is None:
        return
    x, last = wide, scaled
    if wide.target is TO_COPY and isinstance(wide.args[0], fx.Node):
        back = only_user(scaled)
        narrow = dtype_of(wide.args[0])
        if back is not None and back.target is TO_COPY and dtype_of(back) == narrow:
            x, last = wide.args[0], back
    weight: fx.Node | None = None
    user = only_user(last)
    if user is not None and user.target is _MUL:
        other = next((a for a in user.args if a is not last), None)
        if isinstance(other, fx.Node) and shape_of(other) == shape_of(x)[-1:] and dtype_of(user) == dtype_of(x):
            weight, last = other, user
    _replace(graph, mode, last, x, weight, eps)


def _mean_square(rsqrt: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, eps) if the node is ``rsqrt(mean(x**2, -1, keepdim) + eps)``."""
    shifted = rsqrt.args[0]
    if not isinstance(shifted, fx.Node) or shifted.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    mean, eps = shifted.args[:2]
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or not isinstance(eps, float):
        return None
    square, dims = mean.args[:2]
    keepdim = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
    if not isinstance(square, fx.Node) or not keepdim or not isinstance(dims, (list, tuple)):
        return None
    if list(dims) not in ([-1], [len(shape_of(square)) - 1]):
        return None
    x = square.args[0]
    return (x, eps) if _is_square(square) and isinstance(x, fx.Node) else None


def _is_square(node: fx.Node) -> bool:
    if node.target is aten.square.default:
        return True
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target is _MUL and node.args[0] is node.args[1]


def _replace(graph: fx.Graph, mode: FakeTensorMode, last: fx.Node, x: fx.Node, weight: object, eps: object) -> None:
    with graph.inserting_before(last):
        value = last.meta["val"] if dtype_of(x) == dtype_of(last) else None  # known: 160 layers need no fake run
        norm = add_call(graph, mode, composite.rms_norm, (x, weight, eps), like=last, value=value)
    if dtype_of(norm) == dtype_of(last):
        last.replace_all_uses_with(norm)
