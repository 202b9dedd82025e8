"""Forward, input gradients and weight gradients of a block as three graphs, which a compiler can be given.

    one trace                       F   h = up(x, w); y = down(h, v)         kept: h
    h, y                            I   g = gy @ v;  gx = g @ w              waits: g
    gradients of x, w, v            W   gw = g^T @ x;  gv = gy^T @ h

The trace is of what runs without a compiler, at the block's level of rematerialisation: what I and W read of F is what
autograd saves there, and what is recomputed comes in I. W has the products that gradients of late parameters alone
need, and what is made of them. What products read is made in I, so that it is what waits (``split_backward``).

A parameter of one dimension has its gradient from I, as has one whose gradient communicates, as without a compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autopar.ir.ops.expert_ffn import recorded_loads
from autopar.ir.primitives.values import of_traces_that_run
from autopar.ir.torch_private import TO_COPY, FakeTensorMode, OpOverload, schema_of
from autopar.runtime.kept_results import communicates


class Part(NamedTuple):
    """A graph, and the names of what it reads and of what it makes."""

    graph: fx.GraphModule
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Names are of nodes in one trace. arguments: of the block; an integer has a name that nothing reads. results: of
    the block, the outputs in order, of which ``trained`` take a gradient, under the names ``gradients``.

    early, late: number of an argument -> name of its gradient, made by ``to_inputs`` and by ``to_weights``.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    trained: tuple[int, ...]
    gradients: tuple[str, ...]
    early: Mapping[int, str]
    late: Mapping[int, str]
    forward: Part
    to_inputs: Part
    to_weights: Part


class NotInParts(Exception):
    """A block writes to tensors, or a result of it is none."""


def parts_of(call: Callable[..., Any], args: Sequence[Any], late: Collection[int]) -> BlockParts:
    """``call`` in parts. args: tensors and integers, like those that it will be given; nothing is read of tensors but
    shapes. late: numbers of those that get their gradient in W, where they need one.

    Raises NotInParts, and NeedsValues or one of torch's errors where what an op does depends on numbers.
    """
    trace = _Trace(call, args)
    return _Cut(trace, late).parts()


class _Trace:
    """Forward and backward of ``call`` in one graph.

    is_tensor: of each argument. needed: numbers of those that need a gradient. trained: of the results that have one.
    tensors, gradients: nodes of the arguments that are tensors, and of the gradients that are given. forward: nodes of
    the forward. results: nodes. found: nodes of the gradients of what needs one, None of what has none.
    """

    def __init__(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        self._call, self._args = call, args
        self.is_tensor = [isinstance(arg, Tensor) for arg in args]
        self.needed = [number for number, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        # What a call is given may come from modules, whose constants have values.
        with FakeTensorMode(allow_non_fake_inputs=True), of_traces_that_run(), recorded_loads(), torch.enable_grad():
            tensors = [_like(arg) for arg in args if isinstance(arg, Tensor)]
            made = self._run(tensors)
            if not all(isinstance(result, Tensor) for result in made):
                raise NotInParts("a result is no tensor")
            self.trained = tuple(number for number, result in enumerate(made) if result.requires_grad)
            gradients = [torch.empty(made[n].shape, dtype=made[n].dtype, device=made[n].device) for n in self.trained]
            count = len(made)
            del made
            self.module = make_fx(lambda *given: self._both(given[: len(tensors)], given[len(tensors) :]))(
                *tensors, *gradients
            )
        nodes = list(self.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.tensors, self.gradients = placeholders[: len(tensors)], placeholders[len(tensors) :]
        self.forward = {node for node in nodes[: self._boundary] if node.op != "placeholder"}
        _divide_convolutions(nodes[self._boundary :])
        self.results, self.found = nodes[-1].args[0][:count], nodes[-1].args[0][count:]

    def _run(self, tensors: Sequence[Tensor]) -> list[Any]:
        given = iter(tensors)
        args = [
            next(given).detach().requires_grad_(number in self.needed) if isinstance(arg, Tensor) else arg
            for number, arg in enumerate(self._args)
        ]
        self._leaves = [args[number] for number in self.needed]
        return list(self._call(*args))

    def _both(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        made = self._run(tensors)
        mode = get_proxy_mode()
        assert mode is not None, "the function is being traced"
        self._boundary = len(mode.tracer.graph.nodes)
        leaves, self._leaves = self._leaves, []
        found = torch.autograd.grad([made[number] for number in self.trained], leaves, gradients, allow_unused=True)
        return [*made, *found]


def _divide_convolutions(backward: Iterable[fx.Node]) -> None:
    """A convolution's backward gives the gradients of input, weight and bias. Have one of its own give the weight's."""
    for node in backward:
        if node.target is not torch.ops.aten.convolution_backward.default:
            continue
        args, wanted = node.args[:-1], cast("list[bool]", node.args[-1])
        users = [user for user in node.users if user.args[1] == 1]
        if not users:
            continue
        with node.graph.inserting_before(node):
            own = node.graph.call_function(node.target, (*args, [False, True, False]), node.kwargs)
        node.args = (*args, [wanted[0], False, wanted[2]])
        for user in users:
            user.args = (own, 1)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class _Cut:
    """A trace in three."""

    def __init__(self, trace: _Trace, late: Collection[int]) -> None:
        self._trace = trace
        self._order = {node: number for number, node in enumerate(trace.module.graph.nodes)}
        self._gradients = {
            number: node for number, node in zip(trace.needed, trace.found, strict=True) if node is not None
        }
        self._late = {number for number in late if number in self._gradients}
        self._in_weights = self._only_for_weights()
        while early := {number for number in self._late if any(map(_sends, self._own(self._in_weights, number)))}:
            self._late -= early
            self._in_weights = self._only_for_weights()
        # What no product is on the way to has its gradient from I already.
        self._late = {number for number in self._late if self._gradients[number] in self._in_weights}

    def parts(self) -> BlockParts:
        trace = self._trace
        late = {number: self._gradients[number] for number in sorted(self._late)}
        early = {number: node for number, node in self._gradients.items() if number not in late}
        weights = self._part(late.values(), self._in_weights)
        backward = {node for node in self._order if node.op == "call_function"} - trace.forward - self._in_weights
        waits = [node for node in weights.crossing if node in backward]
        inputs = self._part([*early.values(), *waits], backward)
        kept = [node for node in (*inputs.crossing, *weights.crossing) if node in trace.forward]
        forward = self._part([*trace.results, *kept], trace.forward)
        names = iter(trace.tensors)
        return BlockParts(
            arguments=tuple(next(names).name if is_tensor else "" for is_tensor in trace.is_tensor),
            results=tuple(node.name for node in trace.results),
            trained=trace.trained,
            gradients=tuple(node.name for node in trace.gradients),
            early={number: node.name for number, node in early.items()},
            late={number: node.name for number, node in late.items()},
            forward=forward.part,
            to_inputs=inputs.part,
            to_weights=weights.part,
        )

    def _only_for_weights(self) -> set[fx.Node]:
        """The nodes of W."""
        backward = {node for node in self._order if node.op == "call_function"} - self._trace.forward
        early = [node for number, node in self._gradients.items() if number not in self._late]
        for_inputs = _ancestors(early, backward)
        candidates = _ancestors([self._gradients[number] for number in self._late], backward) - for_inputs
        found: set[fx.Node] = set()
        for node in sorted(candidates, key=self._order.__getitem__):
            if _is_large(node.target) or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _own(self, nodes: set[fx.Node], number: int) -> set[fx.Node]:
        return _ancestors([self._gradients[number]], nodes)

    def _part(self, wanted: Iterable[fx.Node], own: set[fx.Node]) -> _Extract:
        return _Extract(self._trace.module, list(dict.fromkeys(wanted)), own, self._order)


class _Extract:
    """The nodes of ``own`` that ``wanted`` are made of, as a graph. crossing: what it reads of other parts.

    Views, and what is made of no tensor, cost nothing, and are made again where they are read.
    """

    def __init__(
        self, module: fx.GraphModule, wanted: list[fx.Node], own: set[fx.Node], order: Mapping[fx.Node, int]
    ) -> None:
        included: set[fx.Node] = set()
        read: set[fx.Node] = set()
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node in included or node in read:
                continue
            if node.op != "placeholder" and (node in own or _is_free(node)):
                included.add(node)
                stack.extend(node.all_input_nodes)
            else:
                read.add(node)
        self.crossing = sorted(read, key=order.__getitem__)
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self.crossing}
        for node in sorted(included, key=order.__getitem__):
            if _writes(node):
                raise NotInParts(f"{node.target} writes to a tensor")
            copies[node] = graph.node_copy(node, copies.__getitem__)
        makes = [node for node in wanted if node.op != "placeholder"]
        graph.output(tuple(copies[node] for node in makes))
        self.part = Part(
            graph=fx.GraphModule(_constants(module, included), graph),
            reads=tuple(node.name for node in self.crossing),
            makes=tuple(node.name for node in makes),
        )


def _constants(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> nn.Module:
    root = nn.Module()
    for node in nodes:
        if node.op == "get_attr":
            root.register_buffer(str(node.target), getattr(module, str(node.target)))
    return root


def _ancestors(nodes: Iterable[fx.Node], within: Collection[fx.Node]) -> set[fx.Node]:
    """``nodes`` and what they are made of, as far as that is ``within``."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in within and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _is_free(node: fx.Node) -> bool:
    """Whether a node takes no time and no memory of its own: a view, or nothing but numbers."""
    if node.target is operator.getitem:
        return _is_free(node.args[0])  # type: ignore[arg-type]  # what it takes an item of is a node
    if not node.all_input_nodes:
        return not _draws(node.target)
    return isinstance(node.target, OpOverload) and node.target.is_view


def _draws(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _is_large(target: Any) -> bool:
    """Whether an op is neither a view nor pointwise: a product, a sum, the gradient of a table."""
    if not isinstance(target, OpOverload) or target is TO_COPY:
        return False
    return not target.is_view and torch.Tag.pointwise not in target.tags


def _sends(node: fx.Node) -> bool:
    return communicates(node.target)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
