"""``torch.compile`` for blocks under a split backward: a block's forward, its I and its W are compiled one by one.

    autograd      ... ── block ── ...        one node, whose backward runs once in I and once in W
                           │ │
                           w v

``torch.compile`` alone makes one backward of a block, for inputs and weights together. Here the block is traced in
three parts (``block_parts``), once for each distinct block and shape. Its node runs those parts that the pass at
hand asks for, and lets go of what no later pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.primitives.collectives import apply
from autopar.ir.primitives.values import NeedsValues
from autopar.ir.torch_private import will_run
from autopar.runtime.block_parts import BlockParts, NotInParts, Part, parts_of
from autopar.runtime.compiled import without_reads
from autopar.runtime.split_activations import is_on_line
from autopar.runtime.torch_private import NO_VALUES

# So many shapes of a block are compiled, as by torch.compile itself; others run as they are.
MOST_SHAPES = 8

_Run = Callable[..., tuple[Tensor, ...]]


def compile_split_block(function: fx.GraphModule, remat: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with everything but its reads of parameters compiled. remat: the rematerialisation around it.

    A block whose ops depend on values (a mixture of experts reads how many tokens chose each) runs as it is.
    """
    body, reads = without_reads(function.graph)
    placeholders = [node.name for node in function.graph.nodes if node.op == "placeholder"]
    state = [number for number, (place, _) in enumerate(reads) if placeholders[place].startswith("w")]
    block = _SplitBlock(remat(body.forward), torch.compile(body.forward), state)

    def run(*args: Any) -> Any:
        return block(*[read(args[number]) for number, read in reads])

    return run


class _SplitBlock:
    """state: numbers of the arguments that are parameters and buffers."""

    def __init__(self, call: Callable[..., Any], plain: Callable[..., Any], state: Iterable[int]) -> None:
        self._call, self._plain, self._state = call, plain, tuple(state)
        self._compiled: dict[tuple[Any, ...], _Compiled | None] = {}

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return self._plain(*args)
        key = tuple(_described(arg) for arg in args)
        if key not in self._compiled and len(self._compiled) < MOST_SHAPES:
            self._compiled[key] = self._compile(args)
        compiled = self._compiled.get(key)
        return self._call(*args) if compiled is None else apply(_Block, compiled, *args)

    def _compile(self, args: tuple[Any, ...]) -> _Compiled | None:
        # Gradients of vectors cost no more than a sum (``split_backward``).
        late = [number for number in self._state if args[number].ndim > 1]
        try:
            return _Compiled(parts_of(self._call, args, late), args)
        except (NotInParts, NeedsValues, *NO_VALUES):
            return None


def _described(arg: Any) -> Any:
    """What the parts of a block depend on."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.shape, arg.stride(), arg.dtype, arg.device, arg.requires_grad


class _Compiled:
    """The parts of a block, compiled.

    edges: numbers of the arguments that are tensors, in the order of autograd's edges. saved: what backward reads.
    """

    def __init__(self, parts: BlockParts, args: tuple[Any, ...]) -> None:
        self.parts = parts
        self.edges = [number for number, arg in enumerate(args) if isinstance(arg, Tensor)]
        self.forward, self.to_inputs, self.to_weights = map(
            _compiled, (parts.forward, parts.to_inputs, parts.to_weights)
        )
        self.saved = {*parts.to_inputs.reads, *parts.to_weights.reads} - {*parts.gradients, *parts.to_inputs.makes}


def _compiled(part: Part) -> _Run:
    run: _Run = torch.compile(part.graph.forward, dynamic=False)
    return run


class _Values(dict[str, Tensor]):
    """Tensors by the names of a trace."""

    def run(self, part: Part, call: _Run) -> None:
        """Add what a part makes."""
        if part.makes:
            made = call(*[self[name] for name in part.reads])
            self.update(zip(part.makes, made, strict=True))


class _Block(torch.autograd.Function):
    """A block as one node. It is ``split_backward`` that says which gradients a pass asks for."""

    @staticmethod
    def forward(ctx: Any, compiled: _Compiled, *args: Any) -> tuple[Tensor, ...]:
        parts = compiled.parts
        # Detached, as a compiler would look for gradients.
        values = _Values({name: arg.detach() for name, arg in zip(parts.arguments, args, strict=True) if name})
        values.run(parts.forward, compiled.forward)
        results = tuple(values[name] for name in parts.results)
        ctx.mark_non_differentiable(*(r for number, r in enumerate(results) if number not in parts.trained))
        ctx.compiled, ctx.waits, ctx.keeps_what_it_reads = compiled, False, True
        # A result that its own node held would never go.
        ctx.values = {name: values[name].detach() for name in compiled.saved}
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        compiled: _Compiled = ctx.compiled
        parts, values = compiled.parts, _Values(ctx.values)
        edges = zip(compiled.edges, ctx.next_functions, strict=True)
        wanted = {number for number, (node, _) in edges if node is not None and will_run(node)}
        if not ctx.waits:
            values.update(
                (name, grads[number].contiguous()) for name, number in zip(parts.gradients, parts.trained, strict=True)
            )
            values.run(parts.to_inputs, compiled.to_inputs)
        if not wanted.isdisjoint(parts.late):
            values.run(parts.to_weights, compiled.to_weights)
        on_line = is_on_line(ctx)
        if on_line:  # W asks for the rest, and is given no gradients
            ctx.waits = True
            reads = () if wanted.issuperset(parts.late) else parts.to_weights.reads
            made = [name for number, name in parts.early.items() if number not in wanted]
            ctx.values = {name: values[name] for name in (*reads, *made)}
        elif on_line is None:  # no pass comes after this one
            ctx.values = {}
        found = {number: values[name] for number, name in {**parts.early, **parts.late}.items() if number in wanted}
        return (None, *(found.get(number) for number in range(len(parts.arguments))))
