"""Small captured models written by hand, without the seconds that an export takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.ir.graph import Buffer, CapturedModel, Parameter, StepInput

aten = torch.ops.aten


class Tracer:
    """Builds a ``CapturedModel`` op by op. Placeholders have to come first."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, Buffer] = {}
        self.inputs: dict[str, StepInput] = {}
        self.path = ""
        self._first_call: fx.Node | None = None

    def _placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        before = self._first_call
        with self.graph.inserting_before(before) if before else self.graph.inserting_after():
            node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return node

    def param(self, name: str, *shape: int) -> fx.Node:
        node = self._placeholder(name, shape, torch.float32)
        self.parameters[node.name] = Parameter(names=(name,), shape=shape, dtype=torch.float32)
        return node

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self._placeholder(name, shape, dtype)
        self.buffers[node.name] = Buffer(name=name, persistent=True)
        return node

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, batch_dim: int | None = 0) -> fx.Node:
        node = self._placeholder(name, shape, dtype)
        self.inputs[node.name] = StepInput(key=name, batch_dim=batch_dim)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self._first_call = self._first_call or node
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        node.meta.update(
            val=target(*values[0], **values[1]), path=self.path, source=f"model.py:{len(self.graph.nodes)}"
        )
        return node

    def updated_by(self, buffer: fx.Node, node: fx.Node) -> None:
        old = self.buffers[buffer.name]
        self.buffers[buffer.name] = Buffer(name=old.name, persistent=True, updated_by=node.name)

    def linear(self, name: str, x: fx.Node, width: int) -> fx.Node:
        weight = self.param(f"{name}.weight", width, x.meta["val"].shape[-1])
        return self.call(aten.linear.default, x, weight)

    def done(self, *outputs: fx.Node, has_loss: bool = True) -> CapturedModel:
        self.graph.output(tuple(outputs))
        self.graph.lint()
        _, spec = pytree.tree_flatten(0)
        return CapturedModel(
            graph_module=fx.GraphModule(torch.nn.Module(), self.graph),
            parameters=self.parameters,
            buffers=self.buffers,
            inputs=self.inputs,
            constants={},
            in_spec=spec,
            out_spec=spec,
            has_loss=has_loss,
            num_outputs=len(outputs) - has_loss,
            batch_size=8,
            name="model",
            fingerprint="0",
        )
