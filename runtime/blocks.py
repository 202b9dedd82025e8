"""Blocks as modules: parameters under their original names, code shared by identical blocks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from operator import truediv
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx, nn

from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.lowered.chunked_loss import chunked_call, linear_cross_entropy
from autopar.ir.lowered.random import is_random
from autopar.ir.ops.scan import AssociativeScan, Scan
from autopar.ir.placed.recomputed import Recomputation
from autopar.ir.primitives.collectives import bind_groups
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.program import BlockProgram
from autopar.ir.program_sizes import FIXED
from autopar.ir.rematerialisation import Remat
from autopar.ir.sizes import Ratio, Size
from autopar.ir.torch_private import own_buffers, own_modules, own_parameters, pytree
from autopar.runtime.compiled import compile_block
from autopar.runtime.host_activations import HostMemory
from autopar.runtime.recomputation import Waiting
from autopar.runtime.rematerialised import mark, rematerialised
from autopar.runtime.split_compiled import compile_split_block
from autopar.runtime.tiled import Tiled, TiledCalls, tiles_of


def attach(root: nn.Module, name: str, value: torch.Tensor, *, persistent: bool = True) -> None:
    """Register a parameter or buffer under a dotted name, with empty modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        child = own_modules(root).get(part)
        if child is None:
            child = nn.Module()
            root.add_module(part, child)
        root = child
    if isinstance(value, nn.Parameter):
        root.register_parameter(leaf, value)
    else:
        root.register_buffer(leaf, value, persistent=persistent)


class Slot:
    """A named place of a parameter or buffer. What is in it changes: FSDP swaps gathered and sharded tensors.

    copy: what blocks read in its stead, if anything.
    """

    __slots__ = ("_leaf", "_places", "copy")

    def __init__(self, root: nn.Module, name: str) -> None:
        *path, leaf = name.split(".")
        for part in path:
            child = own_modules(root)[part]
            assert child is not None
            root = child
        self.copy: torch.Tensor | None = None
        self._leaf = leaf
        self._places: dict[str, Any] = own_parameters(root) if leaf in own_parameters(root) else own_buffers(root)

    def get(self) -> torch.Tensor:
        """The tensor in place."""
        value: torch.Tensor = self._places[self._leaf]
        return value

    def read(self) -> torch.Tensor:
        """The tensor that blocks read: the copy, if there is one."""
        return self.get() if self.copy is None else self.copy

    def set(self, value: torch.Tensor) -> None:
        """Put a tensor in place."""
        self._places[self._leaf] = value


class _Traits(NamedTuple):
    """Of a function. compiled: by ``torch.compile``. draws: random numbers. keeps_work: some of it is done once."""

    compiled: bool
    draws: bool
    keeps_work: bool


class CodeLibrary:
    """Compiles block graphs to functions; graphs that differ in names alone give one function.

    Graphs are captured for the CPU; tensors that they create are created on ``device``.
    """

    def __init__(
        self,
        group_names: Mapping[str, str],
        device: torch.device,
        *,
        compile_blocks: bool = False,
        splits: bool = False,
    ) -> None:
        """compile_blocks: with ``torch.compile``, each distinct function once. splits: whether the schedule splits the
        backward; a block that is rematerialised is then recomputed once for both passes."""
        self._group_names = group_names
        self._device = device
        self._compile = compile_blocks
        self._splits = splits
        self._tiled = TiledCalls()
        self._functions: dict[tuple[Any, ...], fx.GraphModule] = {}
        self._traits: dict[fx.GraphModule, _Traits] = {}
        self._callables: dict[tuple[fx.GraphModule, Remat, tuple[int, ...] | None], Callable[..., Any]] = {}
        self.host = HostMemory(device)

    def function(
        self, program: BlockProgram, shared: Container[str]
    ) -> tuple[fx.GraphModule, tuple[str, ...], tuple[sympy.Expr, ...], tuple[str, ...]]:
        """A function of the block's state, then its sizes, then its other inputs; what these are.

        State is what the block reads by ``get_attr`` and its inputs that are in ``shared``: parameters and
        buffers of the stage. They are read where they are; passed in, they would go through FSDP's hooks.
        """
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        state = {node: str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
        values: dict[fx.Node, str] = {}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, name in zip(placeholders, program.inputs, strict=True):
            (state if name in shared else values)[node] = name
        sizes: dict[sympy.Expr, fx.Node] = {}
        for number, node in enumerate(state):
            copied[node] = graph.placeholder(f"w{number}")
        for number, expression in enumerate(_expressions(program.graph)):
            sizes[expression] = graph.placeholder(f"s{number}")
        for number, node in enumerate(values):
            copied[node] = graph.placeholder(f"x{number}")

        def own(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return copied[leaf]
            if isinstance(leaf, Ratio):  # a compiler takes a float argument for a constant, and not a quotient
                return graph.call_function(truediv, tuple(sizes.get(part, part) for part in _quotient(leaf)))
            return sizes[leaf.expression] if isinstance(leaf, Size) else leaf

        chunked = {node: call for node in program.graph.nodes if (call := chunked_call(node)) is not None}
        tiled = {region.result: region for region in tiles_of(program.graph)} if program.remat == "full" else {}
        unmade = {node.args[0] for node in chunked}.union(*(region.nodes[:-1] for region in tiled.values()))
        for node in program.graph.nodes:
            if node in unmade:
                continue
            if node in tiled:
                region, operands = self._tiled.of(tiled[node])
                copied[node] = graph.call_function(region, tuple(copied[operand] for operand in operands))
            elif node.op == "call_function":
                target = linear_cross_entropy if node in chunked else node.target
                args, kwargs = pytree.tree_map(own, chunked.get(node, (node.args, node.kwargs)))
                args, kwargs = pytree.tree_map_only(torch.device, lambda _: self._device, (args, kwargs))
                copied[node] = graph.create_node("call_function", target, args, kwargs)
                copied[node].meta["recomputation"] = node.meta.get("recomputation", Recomputation.RUNS)
                copied[node].meta["on_host"] = node.meta.get("on_host", False)
            elif node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], lambda n: copied[n]))
        bind_groups(graph, self._group_names)
        # Known by the targets of calls, which marks wrap.
        traits = _Traits(
            compiled=self._compiles(graph),
            draws=any(map(is_random, graph.nodes)),
            keeps_work=any(node.target is linear_cross_entropy for node in graph.nodes),
        )
        mark(graph, program.remat, compiled=traits.compiled and not self._splits)
        code = graph.python_code("self")
        key = (code.src, *((name, id(value)) for name, value in sorted(code.globals.items())))
        if key not in self._functions:
            self._functions[key] = fx.GraphModule(nn.Module(), graph, class_name=f"Block{len(self._functions)}")
            self._traits[self._functions[key]] = traits
        return self._functions[key], tuple(state.values()), tuple(sizes), tuple(values.values())

    def callable(
        self, function: fx.GraphModule, remat: Remat, on_host: tuple[int, ...] | None = None
    ) -> Callable[..., Any]:
        """``function`` at a level of rematerialisation, compiled if asked for. on_host: numbers of the arguments that
        wait in host memory; None if nothing of it does."""
        key = (function, remat, on_host)
        if key not in self._callables:
            traits = self._traits[function]
            wrap = partial(
                rematerialised,
                remat=remat,
                preserve_rng_state=traits.draws,
                compiled=traits.compiled and not self._splits,
                keeps_work=traits.keeps_work,
                splits_backward=self._splits,
                waiting=None if on_host is None else Waiting(self.host, on_host),
            )
            if traits.compiled:
                compiled = compile_split_block if self._splits else compile_block
                self._callables[key] = compiled(function, wrap)
            else:
                self._callables[key] = wrap(function.forward)
        return self._callables[key]

    def _compiles(self, graph: fx.Graph) -> bool:
        """Whether the function of a graph is compiled."""
        if not self._compile or any(map(is_random, graph.nodes)):
            # The compiler draws other random numbers, and cannot trace who draws which.
            return False
        # A function with a backward of its own may be anything, and a scan or tiles would be unrolled.
        whole = any(isinstance(node.target, (FunctionOp, Scan, AssociativeScan, Tiled)) for node in graph.nodes)
        # Nor does it let a backward write to what forward was given.
        return not whole and not any("history" in node.kwargs for node in graph.nodes)


def _expressions(graph: fx.Graph) -> list[sympy.Expr]:
    """What the sizes in a graph are, each once, in order; of a quotient its parts."""
    found: dict[sympy.Expr, None] = {}
    for node in graph.nodes:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, Size):
                found[leaf.expression] = None
            elif isinstance(leaf, Ratio):
                found.update((part, None) for part in _quotient(leaf) if isinstance(part, sympy.Expr))
    return list(found)


def _quotient(ratio: Ratio) -> tuple[sympy.Expr | int, sympy.Expr | int]:
    """Numerator and denominator, both integers."""
    parts = ratio.expression.as_numer_denom()
    one, other = (int(part) if part.is_Integer else part for part in parts)
    return one, other


def _with_gradients(results: tuple[torch.Tensor, ...], trained: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``results``, which give each of ``trained`` a gradient, of zeros.

    Of no rows some ops give none at all to what they add to them, as attention to its bias; other ranks, which have
    rows, wait for it.
    """
    if not trained or not torch.is_grad_enabled():
        return results
    nothing = sum(read_parameter(value).flatten()[:0].sum() for value in trained)
    return tuple(value + nothing if value.requires_grad else value for value in results)


class BlockModule(nn.Module):
    """One block instance. ``forward(*inputs)`` returns the flat tuple of the block's outputs.

    Its parameters are registered under their original dotted names; a block can have several functions over
    them (one for the training step, one for plain forward), of which ``select`` chooses.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._variants: dict[str, Callable[..., Any]] = {}
        self._functions: dict[str, tuple[fx.GraphModule, ...]] = {}
        self._slots: dict[str, tuple[Slot, ...]] = {}
        self._sizes: dict[str, tuple[sympy.Expr, ...]] = {}
        self._trained: dict[str, tuple[int, ...]] = {}
        self._selected = ""
        self.sizes = FIXED
        """Of the forward at hand."""

    def add_variant(
        self,
        variant: str,
        function: fx.GraphModule,
        call: Callable[..., Any],
        slots: Iterable[Slot],
        sizes: tuple[sympy.Expr, ...] = (),
        trained: Sequence[int] = (),
    ) -> None:
        """Add a function of ``slots``, ``sizes`` and then the block's inputs. call: what runs it. trained: numbers of
        the slots that get a gradient.
        """
        # In a tuple, so that nn.Module does not take the shared function for a child.
        self._functions[variant] = (function,)
        self._slots[variant] = tuple(slots)
        self._sizes[variant], self._trained[variant] = sizes, tuple(trained)
        self._variants[variant] = call
        self._selected = self._selected or variant

    def select(self, variant: str) -> None:
        """Choose the function that ``forward`` runs."""
        self._selected = variant

    @property
    def code(self) -> str:
        """Source of the selected function."""
        return str(self._functions[self._selected][0].code)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs of the block on this rank's local inputs, as a flat tuple."""
        variant = self._selected
        state = [slot.read() for slot in self._slots[variant]]
        sizes = [self.sizes[expression] for expression in self._sizes[variant]]
        result: tuple[torch.Tensor, ...] = self._variants[variant](*state, *sizes, *inputs)
        if not self.sizes.has_rows:
            result = _with_gradients(result, [state[number] for number in self._trained[variant]])
        return result

    def extra_repr(self) -> str:
        """Name of the block."""
        return self.name
