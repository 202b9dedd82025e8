"""Recurrences as one op: a small graph, the *body*, that is run step after step.

    scan(body)(state.., sequence.., constant..) -> last state.., sequence..
        state[t + 1].., out[t].. = body(state[t].., sequence[t].., constant..)

    associative_scan(body)(sequence.., constant..) -> sequence..
        out[t] = body(out[t - 1], sequence[t]), computed as a tree: body is associative and takes many pairs at once

Autograd differentiates the steps as it would those of a Python loop. A body holds the sizes that it was captured with;
on shards and microbatches they are rewritten (``Body.on``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn

from autopar.ir.graph import is_tensor, tensor_results
from autopar.ir.rules.sizes import local_arguments
from autopar.ir.torch_private import FakeTensor, pytree

# A dimension of a tensor of a body: the op that computes it, the number of the result, and the dimension.
Dim = tuple[fx.Node, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Body:
    """The graph of one step: placeholders are its operands, the output is a flat tuple of tensors.

    lines: dimensions that are divided together, numbered; those that have no number are never divided. sizes: what
    ranks have to divide, by number of the line. flops: of one step. nonlinear: the backward of some op is not linear.
    """

    graph: fx.Graph
    lines: Mapping[Dim, int]
    sizes: tuple[int, ...]
    flops: float
    nonlinear: bool = False
    _local: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[fx.Node]:
        """Inputs of the body, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        """Outputs of the body, in order."""
        flat = self.graph.output_node().args[0]
        assert isinstance(flat, (tuple, list))
        return list(flat)  # type: ignore[arg-type]  # tensors only

    def on(self, operands: Sequence[Tensor]) -> Callable[..., Any]:
        """The step for operands of these shapes, which may be shards of those that it was captured with."""
        key = tuple(tuple(operand.shape) for operand in operands)
        if key not in self._local:
            self._local[key] = self._localised(operands).forward
        return self._local[key]

    def _localised(self, operands: Sequence[Tensor]) -> fx.GraphModule:
        shares: dict[int, Fraction] = {}
        for node, operand in zip(self.placeholders, operands, strict=True):
            for dim, (whole, part) in enumerate(zip(node.meta["val"].shape, operand.shape, strict=True)):
                if whole != part:
                    shares[self.lines[node, 0, dim]] = Fraction(part, whole)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copied = copies[node] = graph.node_copy(node, lambda old: copies[old])
            if node.op == "call_function" and is_tensor(node) and shares:
                shape = [
                    int(size * shares.get(self.lines.get((node, 0, dim), -1), Fraction(1)))
                    for dim, size in enumerate(node.meta["val"].shape)
                ]
                copied.args, copied.kwargs = fx.node.map_arg(local_arguments(node, shape), lambda old: copies[old])
        return fx.GraphModule(nn.Module(), graph)

    @property
    def key(self) -> Hashable:
        """Equal for bodies that compute the same."""
        number = {node: place for place, node in enumerate(self.graph.nodes)}
        described = []
        for node in self.graph.nodes:
            arguments = pytree.tree_map_only(fx.Node, lambda n: ("node", number[n]), (node.args, node.kwargs))
            target = node.target if node.op == "call_function" else node.op
            described.append((target, str(arguments), tuple((tuple(t.shape), t.dtype) for t in tensor_results(node))))
        return tuple(described)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scan:
    """Steps that follow from each other. A graph's target; the result is a tuple.

    num_states: of the operands, which come first. sequence_dims: the dimension of each sequence operand along which the
    steps are. out_dims: likewise of each sequence among the results. Whatever follows the sequences is constant.
    """

    body: Body
    num_states: int
    sequence_dims: tuple[int, ...]
    out_dims: tuple[int, ...]

    __name__: ClassVar[str] = "scan"

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        states, sequences, constants = self.split(operands)
        slices = [x.unbind(dim) for x, dim in zip(sequences, self.sequence_dims, strict=True)]
        step = self.body.on((*states, *(own[0] for own in slices), *constants))
        num_steps = len(slices[0])
        shapes_only = any(map(_is_abstract, operands)) and not _has_gradient(operands)
        rows: list[Sequence[Tensor]] = []
        for given in zip(*slices, strict=True):
            results = step(*states, *given, *constants)
            states = results[: self.num_states]
            rows.append(results[self.num_states :])
            if shapes_only:
                rows = rows * num_steps
                break
        outs = [torch.stack(column, dim) for column, dim in zip(zip(*rows, strict=True), self.out_dims, strict=True)]
        return (*states, *outs)

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """States, sequences and constants among operands, or what there is for each of them."""
        first, last = self.num_states, self.num_states + len(self.sequence_dims)
        return operands[:first], operands[first:last], operands[last:]

    @property
    def key(self) -> Hashable:
        """Equal for scans that compute the same."""
        return (type(self), self.body.key, self.num_states, self.sequence_dims, self.out_dims)

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AssociativeScan:
    """An associative function of two elements, along dimension 0. A graph's target; the result is a tuple.

    The body takes the elements before, those after, and constants; its dimension 0 counts pairs of elements.
    """

    body: Body
    num_sequences: int

    __name__: ClassVar[str] = "associative_scan"

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        constants = operands[self.num_sequences :]

        def combined(before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
            given = (*before, *after, *constants)
            return self.body.on(given)(*given)  # type: ignore[no-any-return]  # a tuple of tensors

        return tuple(_tree(combined, operands[: self.num_sequences]))

    @property
    def key(self) -> Hashable:
        """Equal for scans that compute the same."""
        return (type(self), self.body.key, self.num_sequences)

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


def _tree(
    combined: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]], elements: Sequence[Tensor]
) -> Sequence[Tensor]:
    """All running combinations: those of neighbouring pairs give every second one, and one more step the others."""
    length = elements[0].shape[0]
    if length == 1:
        return elements
    pairs = combined([x[: length - 1 : 2] for x in elements], [x[1::2] for x in elements])
    odd = _tree(combined, pairs)
    rest = (length - 1) // 2
    even = [x[:1] for x in elements]
    if rest:
        later = combined([x[:rest] for x in odd], [x[2::2] for x in elements])
        even = [torch.cat(both) for both in zip(even, later, strict=True)]
    return [_interleaved(a, b) for a, b in zip(even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    both = torch.stack([even[: len(odd)], odd], 1).flatten(0, 1)
    return both if len(even) == len(odd) else torch.cat([both, even[-1:]])


def num_combinations(length: int) -> int:
    """Pairs of elements that an associative scan of so many combines: fewer than two for each."""
    return 0 if length < 2 else length // 2 + (length - 1) // 2 + num_combinations(length // 2)


_KNOWN: WeakValueDictionary[Hashable, Scan | AssociativeScan] = WeakValueDictionary()


def one_of_its_kind(op: Scan | AssociativeScan) -> Scan | AssociativeScan:
    """The first op that is the same as this one: equal layers call one object."""
    return _KNOWN.setdefault(op.key, op)


def body_of(
    nodes: Sequence[fx.Node], entries: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of ``nodes`` with placeholders for ``entries`` and for its constants, what else it reads; and these."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def place(node: fx.Node) -> None:
        copies[node] = graph.placeholder(f"x{len(copies)}")
        copies[node].meta["val"] = node.meta["val"]

    inside = set(nodes)
    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outside.update(dict.fromkeys(node for node in outputs if node not in inside))
    constants = [node for node in outside if node not in entries]
    for node in (*entries, *constants):
        place(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    graph.output(tuple(copies[node] for node in outputs))
    return graph, constants


def _is_abstract(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _has_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
