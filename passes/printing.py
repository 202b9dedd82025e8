"""Programs as text: one op a line, with the shape and dtype of its result and its placement on each mesh axis.

linear: f32[8, 64] tp:S(1) = linear(redistribution, read_parameter)
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Shard
from autopar.ir.torch_private import pytree
from autopar.passes.placed_program import PlacedProgram

_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


def program_text(program: PlacedProgram, blocks: Container[int] | None = None) -> str:
    """The ops of ``program``, of ``blocks`` if they are given."""
    nodes = (node for node in call_nodes(program.graph) if blocks is None or node.meta["block"] in blocks)
    return "\n".join(node_text(node, program.placed.mesh) for node in nodes)


def captured_text(captured: CapturedModel) -> str:
    """The ops of a captured model, on global shapes."""
    return "\n".join(node_text(node) for node in call_nodes(captured.graph))


def node_text(node: fx.Node, mesh: Mesh | None = None) -> str:
    """One op. Axes of ``mesh`` on which its result is whole are left out."""
    values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    made = ", ".join(f"{_DTYPES.get(value.dtype, value.dtype)}{list(value.shape)}" for value in values)
    placed = "" if mesh is None else _layout_text(node.meta.get("layout", ()), mesh)
    arguments = [_argument(arg) for arg in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}: {made}{placed} = {_name(node.target)}({', '.join(arguments)})"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function)).removesuffix(".default")


def _layout_text(layout: Layout, mesh: Mesh) -> str:
    placed = [
        f"{name}:{f'S({own.dim})' if isinstance(own, Shard) else 'P'}"
        for name, own in zip(mesh.names, layout)
        if not own.is_replicate()
    ]
    return "".join(f" {one}" for one in placed)


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if callable(value):
        return _name(value)
    return value.name if isinstance(value, fx.Node) else repr(value)
