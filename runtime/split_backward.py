"""Split backward: input gradients of a stage (B pass) at once, weight gradients (W pass) later.

Zero-bubble schedules send the gradient of a stage's inputs on before they compute those of its weights:

    outputs ── linear ── gelu ── linear ── inputs          I: along the line
                 │                  │
                 w                  w'                     W: the branches

The line is every node of the autograd graph from which an input can be reached. Where a branch leaves it, the
gradient that arrives there in I is kept; in W the branch starts from it. A parameter that several branches reach
gets its gradient in I already: computing it from each of them alone would count what they share twice. So does one of
one dimension at the end of a branch of its own, as of a norm or a bias: its gradient costs no more than a sum, and what
that reads would have to be held until W (``split_activations``).

Unlike the split in ``torch.distributed.pipelining``, the weight-gradient pass runs the hooks that sum gradients over
ranks, and outputs that depend on no input (an embedding that a later stage computes) lose nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.runtime.split_activations import releasing

Grads = dict[int, torch.Tensor]


@dataclass(slots=True)
class _Branches:
    """What leaves the line at one node: gradients of the node's results, and the parameters to be reached."""

    node: Node
    parameters: list[torch.Tensor]
    grads: Grads = field(default_factory=dict)

    def keep(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """A compiled block (``split_compiled``) keeps those that it reads itself, and is run by one without memory."""
        self.grads = {number: grad for number, grad in enumerate(grads) if grad is not None}
        if self.grads and getattr(self.node, "keeps_what_it_reads", False):
            number, grad = next(iter(self.grads.items()))
            self.grads = {number: grad.new_zeros(()).expand_as(grad)}


@dataclass(slots=True)
class WeightPass:
    """The weight-gradient pass of one backward; holds what it needs of the graph until it has run. early: parameters
    that have their gradient from the input-gradient pass."""

    _branches: list[_Branches]
    _early: Sequence[torch.Tensor] = ()

    def run(self) -> None:
        """Accumulate the gradients of the parameters, as a backward would."""
        for branches in self._branches:
            if branches.grads:
                edges = [GradientEdge(branches.node, number) for number in branches.grads]
                torch.autograd.backward(edges, list(branches.grads.values()), inputs=branches.parameters)
        self._branches = []
        # Where each weight-gradient pass ends in a sum over ranks, that of the microbatch before has taken these along.
        # As many numbers are summed each time.
        for parameter in self._early:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def backward_to_inputs(
    outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> WeightPass:
    """The input-gradient pass: accumulates in ``grad`` of ``inputs`` (leaves) the gradients of ``outputs``."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    roots = [(get_gradient_edge(output), grad) for output, grad in pairs]
    leaves = {get_gradient_edge(value).node for value in inputs if value.requires_grad}
    graph = _Graph.of([edge.node for edge, _ in roots], leaves)
    early = graph.early()
    kept: list[_Branches] = []
    handles = []
    for node, ends in graph.branches.items():
        own = [_variable(end) for end in ends if end not in early]
        if not own:
            continue
        branches = _Branches(node, own)
        kept.append(branches)
        if graph.on_line[node]:
            handles.append(node.register_prehook(partial(_keep, branches)))
        else:
            for edge, grad in roots:
                if edge.node is node:
                    assert grad is not None, "a loss depends on what the stage received"
                    branches.grads[edge.output_nr] = grad
    at_once = [_variable(end) for end in early]
    targets = [*(_variable(leaf) for leaf in leaves), *at_once]
    later = {branches.node for branches in kept}

    def on_line(node: Node) -> bool:
        return graph.on_line.get(node, False)

    def still_read(node: Node) -> bool:
        return node in later or not on_line(node)

    try:
        if targets:
            with releasing(on_line, still_read):
                torch.autograd.backward(
                    [output for output, _ in pairs], [grad for _, grad in pairs], retain_graph=True, inputs=targets
                )
    finally:
        for handle in handles:
            handle.remove()
    return WeightPass(kept, at_once)


def _keep(branches: _Branches, grads: tuple[torch.Tensor | None, ...]) -> None:
    branches.keep(grads)


def _variable(leaf: Node) -> torch.Tensor:
    value: torch.Tensor = leaf.variable  # type: ignore[attr-defined]  # of AccumulateGrad
    return value


@dataclass(frozen=True, slots=True)
class _Graph:
    """The autograd graph of a stage, its nodes in an order in which a backward may run them.

    on_line: whether an input can be reached from a node. ends: the parameters that can be reached from it without
    passing a node of the line.
    """

    starts: frozenset[Node]
    on_line: dict[Node, bool]
    ends: dict[Node, dict[Node, None]]

    @classmethod
    def of(cls, roots: Sequence[Node], inputs: set[Node]) -> _Graph:
        """Time O(edges of the graph)."""
        on_line: dict[Node, bool] = {}
        ends: dict[Node, dict[Node, None]] = {}
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, done = stack.pop()
            if done:
                children = [child for child, _ in node.next_functions if child is not None]
                on_line[node] = node in inputs or any(on_line[child] for child in children)
                below: dict[Node, None] = {}
                for child in children:
                    if not on_line[child]:
                        below.update(ends[child])
                if not children and node not in inputs and hasattr(node, "variable"):
                    below[node] = None
                ends[node] = below
            elif node not in on_line:
                # A node on the stack twice is finished by its upper entry first.
                stack.append((node, True))
                stack.extend((child, False) for child, _ in node.next_functions if child is not None)
        order = list(reversed(on_line))
        return cls(frozenset(roots), {n: on_line[n] for n in order}, {n: ends[n] for n in order})

    @property
    def branches(self) -> dict[Node, dict[Node, None]]:
        """Nodes where branches start, and the parameters at their ends."""
        return {node: ends for node, ends in self.ends.items() if self.on_line[node] or node in self.starts}

    def early(self) -> dict[Node, None]:
        """The parameters that get their gradient in I."""
        uses = Counter(end for ends in self.branches.values() for end in ends)
        early = {end: None for end, count in uses.items() if count > 1}
        early.update(self._vectors())
        senders = [node for node in self.ends if getattr(node, "communicates", False)]
        for node in senders:
            if self.on_line[node]:
                early.update(self.ends[node])
        # I runs the others where it has to reach a parameter behind them. Then it reaches them all.
        grown = -1
        while grown != len(early):
            grown = len(early)
            for node in senders:
                if not early.keys().isdisjoint(self.ends[node]):
                    early.update(self.ends[node])
        return early

    def _vectors(self) -> Iterator[tuple[Node, None]]:
        """The parameters of one dimension that are alone at the end of a branch of the line."""
        for node in self.ends:
            for child, _ in node.next_functions if self.on_line[node] else ():
                if child is not None and not self.on_line[child] and len(self.ends[child]) == 1:
                    (end,) = self.ends[child]
                    if _variable(end).ndim == 1:
                        yield end, None
