"""The captured program: an ``fx.Graph`` plus what its placeholders and outputs mean.

The graph is functional ATen plus the composite ops of ``autopar.ir.ops.composite``, with global shapes:
``node.meta["val"]`` is a fake tensor (or a tuple of them, or a plain value). Parameters, buffers and step
inputs are placeholders. ``node.meta["path"]`` is the module path a node came from (``layers.3.mlp.up``)
and ``node.meta["source"]`` the user's source line, as ``file.py:12 in forward: x = self.up(x)``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import sympy
import torch
from torch import fx, nn

from autopar.ir.torch_private import LazyGraphModule, pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The piece of a model's parameter that a captured parameter is: ``start`` to ``stop`` along ``dim``.

    names, shape: of the whole.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{':, ' * self.dim}{self.start}:{self.stop}]"

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of the piece."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter. ``names[0]`` is its name in the model's state dict, the others are tied aliases.

    part: what it is a piece of, if the model fuses several parameters into one that are better placed apart
        (query, key and value). Its names then end in the piece: ``attn.c_attn.weight[:, 0:768]``.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    part: Part | None = None

    def piece(self, dim: int, start: int, stop: int) -> Parameter:
        """The piece from ``start`` to ``stop`` along ``dim``."""
        assert self.part is None, f"{self.name} is a piece already"
        part = Part(names=self.names, shape=self.shape, dim=dim, start=start, stop=stop)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return replace(self, names=tuple(f"{name}{part}" for name in self.names), shape=shape, part=part)

    @property
    def name(self) -> str:
        """First of the names that a tied parameter has."""
        return self.names[0]

    @property
    def whole_names(self) -> tuple[str, ...]:
        """Names in the model of the parameter that this is, or is a piece of."""
        return self.names if self.part is None else self.part.names

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This parameter, as a view of the model's tensor."""
        return whole if self.part is None else self.part.of(whole)

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer. ``persistent``: it is in the state dict, under ``aliases`` as well.

    ``updated_by``: name of the node with its new value. ``history``: it is none of the model, but of the largest
    magnitudes of earlier steps (``ops.maxima_history``).
    """

    name: str
    persistent: bool
    aliases: tuple[str, ...] = ()
    updated_by: str | None = None
    history: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One tensor that each step passes in.

    ``key`` addresses it in the flattened ``(args, kwargs)`` of a call, e.g. ``args[0]``, ``kwargs['labels']``,
    ``target``. ``batch_dim`` is the dimension of the global batch, None if it has none.
    """

    key: str
    batch_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """An unmodified model as one functional program over the global batch.

    graph_module: its graph's only output is a flat tuple: the loss first if there is one (``has_loss``),
        then the model's outputs, then new values of the updated buffers.
    parameters, buffers, inputs: by placeholder name, in placeholder order.
    in_spec: pytree spec of ``(args, kwargs)`` as example inputs came; out_spec: of the model's output.
    constants: tensors lifted by capture, by placeholder name (real tensors).
    batch_size: global batch in the example inputs.
    fingerprint: hash of parameter names and shapes and of the ops, to tell whether a plan fits a model.
    symbols: of sizes of the step inputs, by name; none of a capture of one size. fixed: names of sizes that were to be
        symbols -> why they are numbers, with the line of the model where there is one.
    """

    graph_module: fx.GraphModule
    parameters: dict[str, Parameter]
    buffers: dict[str, Buffer]
    inputs: dict[str, StepInput]
    constants: dict[str, torch.Tensor]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    has_loss: bool
    num_outputs: int
    batch_size: int
    name: str
    fingerprint: str
    symbols: Mapping[str, sympy.Symbol] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The graph of global tensors."""
        return self.graph_module.graph

    def output_args(self) -> tuple[Any, ...]:
        """The flat output tuple: nodes (or constants)."""
        return tuple(next(iter(reversed(self.graph.nodes))).args[0])  # type: ignore[arg-type]

    def loss_node(self) -> fx.Node | None:
        """The node of the loss; None if the model was captured without one."""
        return self.output_args()[0] if self.has_loss else None


def is_tensor(node: fx.Node) -> bool:
    """Whether a node makes a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


class Typed(Protocol):
    """A tensor, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""


def has_gradient_dtype(value: Typed) -> bool:
    """Whether a gradient can flow through a tensor of this dtype: real or complex numbers."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_getitem(node: fx.Node) -> bool:
    """Whether a node only names one result of an op with several. It is no op and has no rule; see ``source``."""
    return node.op == "call_function" and node.target is operator.getitem


def source(node: fx.Node) -> tuple[fx.Node, int]:
    """The op that computes a tensor, and the number of the tensor in ``tensor_results`` of that op.

    Looks through ``getitem``. An operand that is a ``getitem`` has the layout of that result.
    """
    if not is_getitem(node):
        return node, 0
    producer, index = node.args
    assert isinstance(producer, fx.Node) and isinstance(index, int), "only results of an op are picked"
    values = producer.meta["val"]
    index %= len(values)
    return producer, sum(isinstance(value, torch.Tensor) for value in values[:index])


def op_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that compute: ``call_nodes`` without ``getitem``. Each has a rule."""
    return (node for node in call_nodes(graph) if not is_getitem(node))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of an op in argument order, keyword arguments last; repeats are kept.

    An operand may be a ``getitem`` of an op with several results. A ``getitem`` itself has no operands here.
    """
    found: list[fx.Node] = []
    _collect(node.args, found)
    _collect(node.kwargs.values(), found)
    return found


def _collect(values: Iterable[Any], found: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            if is_tensor(value):
                found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def tensor_results(node: fx.Node) -> list[torch.Tensor]:
    """Fake tensors that an op returns, in order."""
    if isinstance(value := node.meta.get("val"), torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def call_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The ops of a graph in execution order, without placeholders and output."""
    return (node for node in graph.nodes if node.op == "call_function")


def copy_captured(captured: CapturedModel) -> CapturedModel:
    """A copy of the captured model with a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    return replace(captured, graph_module=module_of(graph))


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a graph. Its code is written when it is first called, which a search never does."""
    return LazyGraphModule(nn.Module(), graph)
