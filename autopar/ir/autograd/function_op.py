"""``torch.autograd.Function`` as one op: its own forward and its own backward, whatever they compute.

    Reverse.apply(x, 0.5)        Reverse(x, 0.5)        one node; autograd calls ``Reverse.backward``

The arguments are flattened. Tensors and plain numbers are arguments of the node, other objects belong to the op, so
that two calls are calls of one op exactly if class, structure and objects are the same.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.capture.module_equality import plain
from autopar.ir.torch_private import FAKE_TENSOR_LOG, FakeTensor, FakeTensorMode, OpOverload, no_modes, pytree

# Objects that a graph can hold as arguments.
_IN_GRAPH = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Hooked(torch.autograd.Function):
    """``x`` itself; its gradient is what ``hook`` makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Any) -> Tensor:
        """A view of ``x``, with ``hook`` for backward."""
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The hook's result for the gradient."""
        return ctx.hook(grad), None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FunctionOp:
    """One way of calling an autograd function. A graph's target: takes the flat arguments, returns the flat results.

    function: the class. spec: structure of its positional arguments. objects: those that a graph cannot hold, by flat
    position, where the node has None. written: positions of tensors that it writes to in place: here it writes to a
    copy. num_results: tensors that it returns; one is returned as it is, more as a tuple. by_value: it cannot run on
    fake tensors. draws: its forward draws random numbers. flops: of one forward on the shapes that it was captured
    with.
    """

    function: type[torch.autograd.Function]
    spec: pytree.TreeSpec
    objects: Mapping[int, Any]
    num_results: int
    written: frozenset[int] = frozenset()
    by_value: bool = False
    draws: bool = False
    flops: float = 0.0

    def __call__(self, *leaves: Any) -> Any:
        abstract = next(
            (leaf for leaf in leaves if isinstance(leaf, FakeTensor) or getattr(leaf, "is_meta", False)), None
        )
        if isinstance(abstract, FakeTensor) and self.by_value:
            return self._shapes(leaves, abstract.fake_mode, abstract.device)
        if abstract is not None and not isinstance(abstract, FakeTensor):
            return self._on_meta(leaves)
        given = [self.objects.get(place, leaf) for place, leaf in enumerate(leaves)]
        for place in self.written:
            given[place] = given[place].clone()
        result = self.function.apply(*pytree.tree_unflatten(given, self.spec))  # type: ignore[no-untyped-call]
        tensors = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        return tensors[0] if self.num_results == 1 else tensors

    def _shapes(self, leaves: Sequence[Any], mode: FakeTensorMode, device: torch.device) -> Any:
        """Fake results: those of a run on numbers."""
        with no_modes(), torch.no_grad():
            result = self(*[number_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        with mode:
            return pytree.tree_map_only(Tensor, lambda t: _empty_like(t, device), result)

    def _on_meta(self, leaves: Sequence[Any]) -> Any:
        """Results on the meta device. Tensors that the function closes over are elsewhere, which fake tensors allow."""
        with without_log(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            result = self(*[_empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        return pytree.tree_map_only(Tensor, lambda t: _empty_like(t, "meta"), result)

    @property
    def __name__(self) -> str:
        return self.function.__name__

    @property
    def key(self) -> Hashable:
        """Equal for ops that compute the same."""
        objects = tuple((place, plain(value)) for place, value in self.objects.items())
        return (self.function, str(self.spec), objects, self.num_results, self.written, self.draws, self.flops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionOp) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"


def is_hook(target: Any) -> bool:
    """Whether an op is a hook on a tensor."""
    return isinstance(target, FunctionOp) and target.function is Hooked


def names_in(function: type[torch.autograd.Function]) -> frozenset[str]:
    """The names of globals, attributes and outer variables that the code of a function reads or writes."""
    methods = [inspect.unwrap(getattr(method, "__func__", method)) for method in vars(function).values()]
    codes: list[Any] = [getattr(method, "__code__", None) for method in methods]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            found.update(code.co_names, code.co_freevars)
            codes += code.co_consts
    return frozenset(found)


def below_hooks(node: fx.Node) -> fx.Node:
    """The tensor on which the hooks are that ``node`` ends, or ``node`` itself."""
    while is_hook(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_own(target: Any) -> bool:
    """Whether an op is the user's or another library's, whose backward need not be the derivative of its forward."""
    if isinstance(target, OpOverload):
        return target.namespace not in ("aten", "prims", "autopar")
    return isinstance(target, FunctionOp)


def separated(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[int, Any]]:
    """Flat arguments as a graph can hold them, and the objects that it cannot, by position."""
    objects = {
        place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor) and type(leaf) not in _IN_GRAPH
    }
    return tuple(None if place in objects else leaf for place, leaf in enumerate(leaves)), objects


@contextmanager
def without_log() -> Iterator[None]:
    """Within, torch does not log how an op on fake tensors failed, which is an answer where one is tried."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _empty_like(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)


def number_like(tensor: Tensor) -> Tensor:
    """Small numbers of a shape and dtype, on the CPU: positive ones, or 0 and 1 for integers."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return (torch.rand(tuple(tensor.shape)) + 0.1).to(tensor.dtype)
    return torch.randint(0, 2, tuple(tensor.shape)).to(tensor.dtype)
